"""The backbone's side of every schedule: its context cache, serial and tree passes. Legend: drafter/tree.py."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..drafter import Layout, MDFlashModel, Rows
from ..drafter.backbone import ContextKV


@dataclass(frozen=True)
class Branches:
    """What precompute leaves: hidden [B, d+1, d, C] of one branch for every r, and their base logits [B, d+1, d, V], None
    where the LM head waits for the selected branch."""

    hidden: Tensor
    logits: Tensor | None


class DrafterRunner:
    """Drafts for a batch of requests on the drafter's device.

    The context cache's slot is the position, like the target's: features of rejected tokens are written too, lie at
    positions >= the next start, and are overwritten before any row may see them. all_logits: the tree ends in the LM head
    over all its branches. passes counts backbone passes.
    """

    def __init__(self, drafter: MDFlashModel, batch: int, slots: int, all_logits: bool):
        self.drafter, self.all_logits, self.passes = drafter, all_logits, 0
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
    def tree(self, tokens_Bn: Tensor, start_B: Tensor, limit: int) -> Branches:
        """The DPara tree on t_0..t_d [B, d+1]: one branch for every r, before r is known."""
        hidden = self._backbone(Layout.tree(self.d), start_B, tokens_Bn[:, None], None, limit)
        return Branches(hidden, self.drafter.lm_head(hidden) if self.all_logits else None)

    def _backbone(
        self, layout: Layout, start_B: Tensor, anchors: Tensor, first: Tensor | None, limit: int,
        only: list[int] | None = None,
    ) -> Tensor:  # fmt: skip
        self.passes += 1
        ids = layout.token_ids(anchors, self.drafter.config.mask_token_id, first)
        rows = Rows.build(layout, start_B[:, None], ids)
        live = min(limit, self.context[0].key.shape[2])
        some = slice(None) if only is None else only
        context = [ContextKV(layer.key[some, :, :live], layer.value[some, :, :live]) for layer in self.context]
        return rows.branches(self.drafter.forward_rows(rows, context, self.drafter.mask(rows, live)))[:, 0]
