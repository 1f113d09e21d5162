"""Near-ties are explained by rounding; anything else is not."""

import torch
from conftest import make_target

from eval.margins import add_margins


def test_only_a_near_tie_is_explained():
    target = make_target()
    target.model.to(torch.bfloat16)
    prompt = [1, 2, 3]
    with torch.no_grad():
        logits = target.logits(target.forward(torch.tensor([prompt])).hidden[0, -1]).float()
        order = logits.argsort(descending=True).tolist()
        target.lm_head.weight[order[1]] = target.lm_head.weight[order[0]]  # a tie
    divergences = [
        {"benchmark": "a", "request": "0", "position": 0, "token": token, "autoregressive": order[0]}
        for token in (order[1], order[-1], None)
    ]
    add_margins(target, {("a", "0"): prompt}, {("a", "0"): [order[0]]}, divergences)
    assert [found["explained"] for found in divergences] == [True, False, False]
    assert divergences[0]["margin"] == 0
    assert divergences[1]["margin"] > 1
    assert divergences[2]["margin"] is None
