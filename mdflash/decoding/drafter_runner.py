"""The drafter's side of every schedule: its context cache, serial and tree passes, the head. Legend: drafter/tree.py."""

import torch
from torch import Tensor

from ..drafter import Layout, MDFlashModel, Rows
from ..drafter.backbone import ContextKV
from ..drafter.sampling import Sampling
from .types import Block, Draft


class DrafterRunner:
    """Drafts for a batch of requests on the drafter's device.

    The context cache's slot is the position, like the target's: features of rejected tokens are written too, lie at
    positions >= the next start, and are overwritten before any row may see them.
    late_passes counts backbone passes that started while `after_barrier` was set (DPara: a fallback).
    """

    def __init__(self, drafter: MDFlashModel, sampling: Sampling, batch: int, slots: int):
        self.drafter, self.sampling = drafter, sampling
        self.d = drafter.draft_length
        self.device = drafter.norm.weight.device
        config = drafter.config
        shape = (batch, config.num_key_value_heads, slots, config.head_dim)
        self.context = [
            ContextKV(*(torch.zeros(shape, dtype=drafter.dtype, device=self.device) for _ in "kv"))
            for _ in drafter.layers
        ]
        self.after_barrier = False
        self.late_passes = 0

    @torch.no_grad()
    def append(self, features_BQF: Tensor, positions_BQ: Tensor, rows: list[int] | None = None) -> None:
        """Project features [B, Q, F] of the given positions and write them into the context; rows: these batch rows alone,
        from position 0 on."""
        features_BQF = features_BQF.to(self.device, self.drafter.dtype)
        positions_BQ = positions_BQ.to(self.device)
        new = self.drafter.project_context(features_BQF, positions_BQ)
        for cache, layer in zip(self.context, new, strict=True):
            if rows is not None:
                Q = positions_BQ.shape[1]
                cache.key[rows, :, :Q], cache.value[rows, :, :Q] = layer.key, layer.value
                continue
            index = positions_BQ[:, None, :, None].expand_as(layer.key)
            cache.key.scatter_(2, index, layer.key)
            cache.value.scatter_(2, index, layer.value)

    @torch.no_grad()
    def serial(self, block: Block, rows: list[int] | None = None) -> Tensor:
        """The k=0 window at p with t_0 in its first slot: hidden states [B, d, C] that draft p+1..p+d. rows: the batch rows
        that the block's are, when it holds some alone."""
        first = block.first.to(self.device)
        anchors = first.new_empty(first.shape[0], 1, 0)
        return self._backbone(Layout.serial(self.d), block, anchors, first[:, None, None], rows)[:, 0]

    @torch.no_grad()
    def tree(self, block: Block) -> Tensor:
        """The DPara tree on t_0..t_d: hidden states [B, d+1, d, C], one branch for every r, before r is known."""
        return self._backbone(Layout.tree(self.d), block, block.tokens.to(self.device)[:, None], None)

    @torch.no_grad()
    def head(self, hidden_BdC: Tensor, bonus_B: Tensor, noise_Bd: Tensor) -> Draft:
        """LM head and Markov head on one window's hidden states, from y_0 = the bonus."""
        base_logits = self.drafter.lm_head(hidden_BdC)
        bonus_B, noise_Bd = bonus_B.to(self.device), noise_Bd.to(self.device)
        return Draft(*self.drafter.head.draft(base_logits, bonus_B, hidden_BdC, noise_Bd, self.sampling))

    def _backbone(
        self, layout: Layout, block: Block, anchors: Tensor, first: Tensor | None, only: list[int] | None = None
    ) -> Tensor:
        self.late_passes += self.after_barrier
        ids = layout.token_ids(anchors, self.drafter.config.mask_token_id, first)
        rows = Rows.build(layout, block.start.to(self.device)[:, None], ids)
        live = min(block.limit, self.context[0].key.shape[2])
        some = slice(None) if only is None else only
        context = [ContextKV(layer.key[some, :, :live], layer.value[some, :, :live]) for layer in self.context]
        return rows.branches(self.drafter.forward_rows(rows, context, self.drafter.mask(rows, live)))[:, 0]
