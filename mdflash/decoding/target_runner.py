"""The target's side of every schedule: its KV cache, prefill and verification. Shape legend: drafter/tree.py."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers.cache_utils import Cache

from ..drafter.sampling import Sampling
from ..target import Target
from .acceptance import decide
from .types import Block, Verdict


class SlotCache(Cache):
    """A static KV cache whose slot IS the position: rejected tokens are overwritten in place, nothing is ever cropped.

    Rows of a batch may stand at different positions. `at` aims the next pass; `fresh` aims a prefill of some rows.
    """

    def __init__(self, target: Target, batch: int, slots: int):
        super().__init__(layers=[])
        config = target.config
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = (batch, config.num_key_value_heads, slots, head_dim)
        self.pairs = [
            [torch.zeros(shape, dtype=target.dtype, device=target.device) for _ in "kv"]
            for _ in range(target.num_layers)
        ]

    def at(self, positions_BQ: Tensor, limit: int) -> Tensor:
        """Aim the next pass at these positions, reading slots 0..limit-1; returns its causal mask [B, 1, Q, limit]."""
        self.positions_BQ, self.limit, self.rows = positions_BQ, limit, None
        slots = torch.arange(limit, device=positions_BQ.device)
        return (slots <= positions_BQ[..., None])[:, None]

    def fresh(self, rows: list[int], positions_BQ: Tensor) -> Tensor:
        """Aim the next pass at a prefill of these batch rows from position 0 on; returns its causal mask [b, 1, Q, Q]."""
        mask = self.at(positions_BQ, positions_BQ.shape[1])
        self.rows = rows
        return mask

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        """Called by each attention layer of the target: store the new states, return all that the pass reads."""
        if self.rows is not None:
            for cache, states in zip(self.pairs[layer_idx], (key_states, value_states), strict=True):
                cache[self.rows, :, : states.shape[2]] = states
            return key_states, value_states
        index = self.positions_BQ[:, None, :, None].expand_as(key_states)
        for cache, states in zip(self.pairs[layer_idx], (key_states, value_states), strict=True):
            cache.scatter_(2, index, states)
        return tuple(cache[:, :, : self.limit] for cache in self.pairs[layer_idx])

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Positions and mask are always given, so transformers has no use for a length."""
        return 0


# What a verify pass starts before its end, and behind how many of its taps: work that gets the features [B, n+1, count·C] of
# t_0..t_n that are in flight by then (None: of no tap, before the pass begins), and the event behind which they may be read
# (None: behind what is enqueued).
Early = tuple[int, Callable[[Tensor | None, object], None]]


class TargetRunner:
    """Prefill and verify a batch of requests. Greedy or sampled, every committed token is decided here."""

    def __init__(self, target: Target, taps: tuple[int, ...], sampling: Sampling, batch: int, slots: int):
        self.target, self.taps, self.sampling = target, taps, sampling
        self.cache = SlotCache(target, batch, slots)

    @torch.no_grad()
    def prefill(
        self, rows: list[int], prompts: list[list[int]], noise_Bn: Tensor | None
    ) -> tuple[Block, Tensor | None]:
        """Read prompts (ragged) into these batch rows. Returns their first block, t_0 alone at position p = prompt length,
        and the features [b, T, F] of the prompts, T the longest (past a prompt's end is padding, overwritten before use).
        noise [b, n+1]: its last column serves t_0."""
        ids_BT = pad_sequence([torch.tensor(p) for p in prompts], batch_first=True).to(self.target.device)
        length_B = torch.tensor([len(p) for p in prompts], device=self.target.device)
        B, T = ids_BT.shape
        positions_BT = torch.arange(T, device=ids_BT.device).expand(B, T)
        out = self.target.forward(ids_BT, self.taps, positions_BT, self.cache, self.cache.fresh(rows, positions_BT))
        last_B1C = out.hidden[torch.arange(B, device=ids_BT.device), length_B - 1][:, None]
        _, first_B = decide(self.target.logits(last_B1C), None, noise_Bn, self.sampling)
        return Block(first_B, None, length_B, torch.ones_like(length_B, dtype=torch.bool), T + 1), out.features

    @torch.no_grad()
    def verify(self, block: Block, noise_Bn: Tensor | None, early: Sequence[Early] = ()) -> Verdict:
        """Forward t_0..t_n once and apply the acceptance rule. noise [B, n+1]: one uniform a draft and one for the bonus."""
        ids_BQ, on_taps = block.tokens, [(count, partial(work, after=None)) for count, work in early if count]
        start_untapped(early)
        positions_BQ = block.start[:, None] + torch.arange(ids_BQ.shape[1], device=ids_BQ.device)
        mask = self.cache.at(positions_BQ, block.limit)
        out = self.target.forward(ids_BQ, self.taps, positions_BQ, self.cache, mask, on_taps)
        outcome = decide(self.target.logits(out.hidden), block.draft, noise_Bn, self.sampling)
        return Verdict.of(*outcome, ids_BQ[:, 1:], out.features, block.draft and block.draft.guessed)


def start_untapped(early: Sequence[Early]) -> None:
    """Start what waits for no tap."""
    for count, work in early:
        if not count:
            work(None, None)
