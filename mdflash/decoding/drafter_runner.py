"""The backbone's side of every schedule: its context cache, serial and tree passes. Legend: drafter/tree.py."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..drafter import Layout, MDFlashModel, Rows
from ..drafter.backbone import ContextKV


@dataclass(frozen=True)
class Branches:
    """What precompute leaves: hidden [B, (d+1)(1+F), d, C] of the branches (for every r the one whose bonus is open, then one
    for each of the guesses [B, d+1, F], None for F = 0), and their base logits [.., V], None where the LM head waits for the
    selected branch."""

    hidden: Tensor
    logits: Tensor | None
    guesses: Tensor | None = None

    def chosen(self, outcome_Bn: Tensor) -> tuple[Tensor, Tensor | None]:
        """The branch [B] that a verdict's outcome picks, and whether it had guessed the bonus [B] (None without guesses)."""
        accepted_B, bonus_B = outcome_Bn[:, 0], outcome_Bn[:, 1]
        if self.guesses is None:
            return accepted_B, None
        row = torch.arange(len(accepted_B), device=accepted_B.device)
        right_BF = self.guesses[row, accepted_B] == bonus_B[:, None]
        hit_B, which_B = right_BF.any(-1), right_BF.int().argmax(-1)
        return accepted_B * (1 + right_BF.shape[1]) + (1 + which_B) * hit_B, hit_B


class DrafterRunner:
    """Drafts for a batch of requests on the drafter's device.

    The context cache's slot is the position, like the target's: features of rejected tokens are written too, lie at
    positions >= the next start, and are overwritten before any row may see them. all_logits: the tree ends in the LM head
    over all its branches. guesses: F, bonuses guessed for every r. passes counts backbone passes.
    """

    def __init__(self, drafter: MDFlashModel, batch: int, slots: int, all_logits: bool, guesses: int = 0):
        self.drafter, self.all_logits, self.guesses, self.passes = drafter, all_logits, guesses, 0
        self.d = drafter.draft_length
        self.device = drafter.norm.weight.device
        config = drafter.config
        shape = (batch, config.num_key_value_heads, slots, config.head_dim)
        self.context = [
            ContextKV(*(torch.zeros(shape, dtype=drafter.dtype, device=self.device) for _ in "kv"))
            for _ in drafter.layers
        ]

    @torch.no_grad()
    def append(self, features_BQF: Tensor, start_B: Tensor) -> None:
        """Project features [B, Q, F] of positions start..start+Q-1 and write them into the context."""
        positions_BQ = start_B[:, None] + torch.arange(features_BQF.shape[1], device=self.device)
        new = self.drafter.project_context(features_BQF.to(self.drafter.dtype), positions_BQ)
        for cache, layer in zip(self.context, new, strict=True):
            index = positions_BQ[:, None, :, None].expand_as(layer.key)
            cache.key.scatter_(2, index, layer.key)
            cache.value.scatter_(2, index, layer.value)

    @torch.no_grad()
    def cold_start(self, features_BTF: Tensor, first_B: Tensor, start_B: Tensor, limit: int, rows: list[int]) -> Tensor:
        """Read new requests' prompt features (from position 0 on) into these batch rows; the hidden states [b, d, C] of their
        first, serial window."""
        B, T = features_BTF.shape[:2]
        positions_BT = torch.arange(T, device=self.device).expand(B, T)
        new = self.drafter.project_context(features_BTF.to(self.drafter.dtype), positions_BT)
        for cache, layer in zip(self.context, new, strict=True):
            cache.key[rows, :, :T], cache.value[rows, :, :T] = layer.key, layer.value
        return DrafterRunner.serial(self, first_B, start_B, limit, rows)

    @torch.no_grad()
    def serial(self, first_B: Tensor, start_B: Tensor, limit: int, rows: list[int] | None = None) -> Tensor:
        """The k=0 window at p with t_0 in its first slot: hidden states [B, d, C] that draft p+1..p+d. limit: the slots any
        context reaches; rows: the batch rows that these requests are, when they are some alone."""
        anchors = first_B.new_empty(first_B.shape[0], 1, 0)
        return self._backbone(Layout.serial(self.d), start_B, anchors, first_B[:, None, None], limit, rows)[:, 0]

    @torch.no_grad()
    def guess(
        self, tokens_Bn: Tensor, start_B: Tensor, limit: int, in_flight_BnF: Tensor | None = None,
        alternatives_BdF: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Bonuses guessed for every r, [B, d+1, F]: the alternatives of t_1..t_d, or what a pass of the spine t_0..t_d
        expects. in_flight as in `tree`."""
        if alternatives_BdF is not None:
            return alternatives_as_guesses(alternatives_BdF, self.drafter.config.mask_token_id)
        given = tokens_Bn[:, None], None, limit, None, in_flight_BnF
        _, spine_BnC = self._rows_pass(Layout.anchors(self.d), start_B, *given)
        return guess_bonuses(self.drafter, spine_BnC, tokens_Bn, self.guesses)

    @torch.no_grad()
    def tree(
        self, tokens_Bn: Tensor, start_B: Tensor, limit: int, in_flight_BnF: Tensor | None = None,
        guesses_BnF: Tensor | None = None,
    ) -> Branches:  # fmt: skip
        """The DPara tree on t_0..t_d [B, d+1]: branches for every r, before r is known. in_flight [B, d+1, ·]: features of
        t_0..t_d, of the earliest taps alone. guesses [B, d+1, F]: see `guess`."""
        first = first_slots(guesses_BnF, self.drafter.config.mask_token_id)
        given = tokens_Bn[:, None], first, limit, None, in_flight_BnF
        hidden = self._backbone(Layout.tree(self.d, self.guesses), start_B, *given)
        return Branches(hidden, self.drafter.lm_head(hidden) if self.all_logits else None, guesses_BnF)

    def _backbone(self, *args) -> Tensor:
        """Hidden states [B, branches, d, C] of one tree."""
        rows, hidden = self._rows_pass(*args)
        return rows.branches(hidden)[:, 0]

    def _rows_pass(
        self, layout: Layout, start_B: Tensor, anchors: Tensor, first: Tensor | None, limit: int,
        only: list[int] | None = None, in_flight_BnF: Tensor | None = None,
    ) -> tuple[Rows, Tensor]:  # fmt: skip
        self.passes += 1
        ids = layout.token_ids(anchors, self.drafter.config.mask_token_id, first)
        live = min(limit, self.context[0].key.shape[2])
        some = slice(None) if only is None else only
        context = [ContextKV(layer.key[some, :, :live], layer.value[some, :, :live]) for layer in self.context]
        taps = None
        if in_flight_BnF is not None:
            flying, taps = self._in_flight(in_flight_BnF, start_B)
            context = [layer.then(more) for layer, more in zip(context, flying, strict=True)]
        rows = Rows.build(layout, start_B[:, None], ids, taps_BN=taps)
        return rows, self.drafter.forward_rows(rows, context, self.drafter.mask(rows, live))

    def _in_flight(self, features_BnF: Tensor, start_B: Tensor) -> tuple[list[ContextKV], Tensor]:
        """Keys and values of the anchors' features in flight, and the tree's count of their taps [B, 1]."""
        B, n, width = features_BnF.shape
        whole = features_BnF.new_zeros(B, n, self.drafter.feature_width, dtype=self.drafter.dtype)
        whole[..., :width] = features_BnF
        taps_B1 = start_B.new_full((B, 1), width // self.drafter.config.hidden_size)
        positions_Bn = start_B[:, None] + torch.arange(n, device=self.device)
        return self.drafter.project_in_flight(whole, positions_Bn, taps_B1.expand(B, n)), taps_B1


def guess_bonuses(drafter: MDFlashModel, spine_BnC: Tensor, tokens_Bn: Tensor, count: int) -> Tensor:
    """For every r the `count` likeliest tokens behind t_r by the drafter's own spine slot, [B, d+1, count]. t_{r+1} is none of
    them for r < d: there it was rejected."""
    code, _ = drafter.head.step(tokens_Bn, spine_BnC, drafter.head.start(tokens_Bn.shape, tokens_Bn))
    logits_BnV = drafter.lm_head(spine_BnC).float() + drafter.head.bias(code)
    logits_BnV[:, :-1].scatter_(2, tokens_Bn[:, 1:, None], float("-inf"))
    return logits_BnV.topk(count, dim=-1).indices


def alternatives_as_guesses(alternatives_BdF: Tensor, mask_token_id: int) -> Tensor:
    """For every r < d what else t_{r+1} might have been; for r = d nothing: the mask token, which is no bonus. [B, d+1, F]."""
    B, _, F = alternatives_BdF.shape
    return torch.cat([alternatives_BdF, alternatives_BdF.new_full((B, 1, F), mask_token_id)], dim=1)


def first_slots(guesses_BnF: Tensor | None, mask_token_id: int) -> Tensor | None:
    """The branches' first slots [B, 1, (d+1)(1+F)]: for every r the mask token, then its guesses; None without guesses."""
    if guesses_BnF is None:
        return None
    open_Bn1 = guesses_BnF.new_full((*guesses_BnF.shape[:2], 1), mask_token_id)
    return torch.cat([open_Bn1, guesses_BnF], dim=-1).flatten(1)[:, None]
