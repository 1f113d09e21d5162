"""Training and decoding are the same function: one training window and the decoder's branch give the same logits."""

import pytest
import torch
from conftest import make_drafter, make_target

from mdflash.decoding.build import RUNNERS
from mdflash.decoding.types import Block, Draft
from mdflash.drafter import Layout
from mdflash.drafter.sampling import Sampling
from mdflash.training import STAGE_WEIGHTS, DrafterForTraining


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize("lengths", [[1, 2], [5, 60, 17], [200]])
@torch.no_grad()
def test_training_window_equals_decoder_branch(family, lengths, runner):
    target = make_target(family, hidden=64, head_dim=16)
    drafter = make_drafter(target)
    drafter.embed_tokens.weight.data = target.embed_tokens.weight.clone()
    drafter.lm_head.weight.data = target.lm_head.weight.clone()
    d, B = drafter.draft_length, len(lengths)
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(0, 90, (n + 3 * d,), generator=generator) for n in lengths]

    # the decoder: ragged prefill of texts[:n], then the tree on the block texts[n : n+d+1]; and the serial window
    slots = max(lengths) + 4 * d
    on_target, on_drafter, _ = RUNNERS[runner]
    verifier = on_target(target, tuple(drafter.config.target_layer_ids), Sampling(), B, slots)
    backbone = on_drafter(drafter, B, slots, all_logits=False)
    prompts = [text[:n].tolist() for text, n in zip(texts, lengths, strict=True)]
    prefilled, features = verifier.prefill(list(range(B)), prompts, None)
    tokens = torch.stack([text[n : n + d + 1] for text, n in zip(texts, lengths, strict=True)])
    start, limit = prefilled.start, prefilled.limit + d
    serial = backbone.cold_start(features, tokens[:, 0], start, limit, list(range(B)))
    branches = backbone.tree(tokens, start, limit).hidden.clone()
    # one round later: features of the block's tokens come from the verify pass through the cache
    verdict = verifier.verify(Block(tokens[:, 0], Draft(tokens[:, 1:]), start, prefilled.live, limit), None)
    backbone.append(verdict.features, start)
    later = torch.stack([text[n + 2] for text, n in zip(texts, lengths, strict=True)])
    later_serial = backbone.serial(later, start + 2, limit + 2)

    for row, (text, n) in enumerate(zip(texts, lengths, strict=True)):
        tree = hidden_in_training(drafter, target, Layout.tree(d), text, n)
        torch.testing.assert_close(drafter.lm_head(branches[row]), drafter.lm_head(tree[0]), atol=1e-4, rtol=1e-4)
        for start, ours in ((n, serial), (n + 2, later_serial)):
            window = hidden_in_training(drafter, target, Layout.serial(d), text, start)
            torch.testing.assert_close(drafter.lm_head(ours[row]), drafter.lm_head(window[0, 0]), atol=1e-4, rtol=1e-4)


def hidden_in_training(drafter, target, layout, text, start):
    """Slots' hidden states [N=1, b, d, C] as the training module computes them, with the whole text in view."""
    module = DrafterForTraining.__new__(DrafterForTraining)
    torch.nn.Module.__init__(module)
    module.drafter, module.layouts, module.weights = drafter, (layout,), STAGE_WEIGHTS["mdflash"]
    ids, starts = text[None], torch.tensor([[start]])
    known = torch.tensor([[k == 0 for k in layout.branches]])
    rows = module._rows(ids, starts, torch.zeros_like(starts), known, None)
    return rows.branches(drafter(target.features(ids, drafter.config.target_layer_ids), rows))[0]
