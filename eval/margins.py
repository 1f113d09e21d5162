"""Whether rounding explains a greedy answer that differs from the autoregressive one."""

from collections.abc import Mapping, Sequence

import torch

from mdflash import Target

ROUNDINGS = 4  # of the dtype's epsilon, relative to the largest logit: what a batched pass may move a logit by


@torch.no_grad()
def add_margins(
    target: Target, prompts: Mapping[tuple[str, str], Sequence[int]], answers: Mapping[tuple[str, str], Sequence[int]],
    divergences: list[dict],
) -> None:  # fmt: skip
    """Add to each divergence (see `statistics.lossless`) its margin and whether rounding explains it.

    prompts and answers: token ids by (benchmark, request), the answers the autoregressive ones. margin: the target's logit
    of the autoregressive token less that of the other, after their common prefix; None where one answer simply ends.
    """
    for found in divergences:
        key = found["benchmark"], found["request"]
        ids = [*prompts[key], *answers[key][: found["position"]]]
        logits = target.logits(target.forward(torch.tensor([ids], device=target.device)).hidden[0, -1]).float()
        ours, theirs = found["token"], found["autoregressive"]
        margin = None if None in (ours, theirs) else (logits[theirs] - logits[ours]).item()
        allowed = ROUNDINGS * torch.finfo(target.dtype).eps * logits.abs().max().item()
        found |= {"margin": margin, "explained": margin is not None and abs(margin) <= allowed}
