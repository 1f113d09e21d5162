"""Windows, the DPara tree and who sees whom: the one rule, its dense mask and its FlexAttention mask.

Shape suffixes here and in the other tensor files:
B requests or texts · T context positions · R rows · N trees of one text · V vocabulary · F feature width ·
H heads · C channels (hidden size) · d draft length

Every mode is the same window (docs/method.md): features at positions < p, then k
anchors (the true tokens p..p+k-1), then d slots at p+k..p+k+d-1. Windows with one start p share their anchors: a `Layout`
is a spine of anchors and one branch of d slots per anchor count k.
  serial DSpark / DFlash    spine 0, branches (0,)
  DPara tree                spine d+1, branches (1, .., d+1)
  one M-DFlash window       spine k, branches (k,)
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

compiled_create_block_mask = torch.compile(create_block_mask, dynamic=True)


@dataclass(frozen=True)
class Layout:
    """The rows of one tree relative to its start p.

    Attributes (lists of R integers unless said):
        spine: anchors shared by the branches. branches: anchor count k of each branch. d: slots of a branch.
        offset: position minus p. seen: anchors visible to the row (anchor j sees itself: j+1). branch: branch number,
        -1 for anchors.
    """

    spine: int
    branches: tuple[int, ...]
    d: int

    def __post_init__(self):
        if self.d < 1 or not self.branches or min(self.branches) < 0 or max(self.branches) > self.spine:
            raise ValueError(
                f"Layout(spine={self.spine}, branches={self.branches}, d={self.d}): d >= 1, at least one branch, and "
                "every anchor count within 0..spine"
            )

    @classmethod
    def serial(cls, d: int) -> "Layout":
        """The k=0 window: d slots, the first of which carries the bonus token."""
        return cls(0, (0,), d)

    @classmethod
    def tree(cls, d: int) -> "Layout":
        """The DPara tree: spine t_0..t_d and a branch for each accepted count r = 0..d (k = r+1)."""
        return cls(d + 1, tuple(range(1, d + 2)), d)

    @property
    def rows(self) -> int:
        return self.spine + len(self.branches) * self.d

    @property
    def offset(self) -> list[int]:
        return [*range(self.spine), *(k + i for k in self.branches for i in range(self.d))]

    @property
    def seen(self) -> list[int]:
        return [*range(1, self.spine + 1), *(k for k in self.branches for _ in range(self.d))]

    @property
    def branch(self) -> list[int]:
        return [-1] * self.spine + [b for b in range(len(self.branches)) for _ in range(self.d)]

    def token_ids(self, anchors_BNs: Tensor, mask_token_id: int, first_BNb: Tensor | None = None) -> Tensor:
        """Ids of the rows, [B, N, R]: the spine's tokens, then mask tokens; `first_BNb` [B, N, branches] puts a known or
        guessed bonus token into each branch's first slot."""
        B, N, _ = anchors_BNs.shape
        slots = anchors_BNs.new_full((B, N, len(self.branches), self.d), mask_token_id)
        if first_BNb is not None:
            slots[..., 0] = first_BNb
        return torch.cat([anchors_BNs, slots.flatten(2)], dim=2)


@dataclass(frozen=True)
class Rows:
    """Rows of N trees for each of B texts, flattened to R_total = N * layout.rows.

    Attributes (int64 [B, R_total]): ids, position (absolute), start (p of the row's tree: features below it are
    visible), tree (which tree the row belongs to), seen and branch (see Layout). layout: the trees' common layout.
    """

    ids: Tensor
    position: Tensor
    start: Tensor
    tree: Tensor
    seen: Tensor
    branch: Tensor
    layout: Layout

    @classmethod
    def build(cls, layout: Layout, start_BN: Tensor, ids_BNR: Tensor) -> "Rows":
        """Place `layout` at every start. start_BN: p of each tree; ids_BNR: its row ids (`Layout.token_ids`)."""
        B, N = start_BN.shape

        def per_row(values: list[int]) -> Tensor:
            row = torch.tensor(values, device=start_BN.device)
            return row.expand(B, N, layout.rows).flatten(1)

        start = start_BN[..., None].expand(B, N, layout.rows).flatten(1)
        tree = torch.arange(N, device=start_BN.device)[:, None].expand(B, N, layout.rows).flatten(1)
        return cls(
            ids=ids_BNR.flatten(1),
            position=start + per_row(layout.offset),
            start=start,
            tree=tree,
            seen=per_row(layout.seen),
            branch=per_row(layout.branch),
            layout=layout,
        )

    def branches(self, hidden_BRC: Tensor) -> Tensor:
        """The slots' part of a per-row tensor: [B, R, ...] -> [B, N, branches, d, ...]; anchors are dropped."""
        B, layout = hidden_BRC.shape[0], self.layout
        per_tree = hidden_BRC.unflatten(1, (-1, layout.rows))[:, :, layout.spine :]
        return per_tree.reshape(B, per_tree.shape[1], len(layout.branches), layout.d, *hidden_BRC.shape[2:])


Rule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def visibility(rows: Rows, context_length: int) -> Rule:
    """THE visibility rule over keys [context ; rows], as a FlexAttention `mask_mod(b, h, query, key)`.

    A row sees the features below its tree's start, the first `seen` anchors of its own tree, and all d slots of its own
    branch; nothing else (docs/method.md). A context column's index is its position.
    """

    def rule(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        in_context = key < context_length
        other = (key - context_length).clamp(min=0)
        same_tree = rows.tree[b, query] == rows.tree[b, other]
        is_anchor = rows.branch[b, other] < 0
        anchor_index = rows.position[b, other] - rows.start[b, other]
        sees_anchor = is_anchor & (anchor_index < rows.seen[b, query])
        sees_slot = ~is_anchor & (rows.branch[b, other] == rows.branch[b, query])
        return torch.where(in_context, key < rows.start[b, query], same_tree & (sees_anchor | sees_slot))

    return rule


def dense_mask(rows: Rows, context_length: int) -> Tensor:
    """The rule as a boolean mask [B, 1, R, T+R] for `scaled_dot_product_attention` (reference, CPU)."""
    B, R = rows.ids.shape
    device = rows.ids.device
    b = torch.arange(B, device=device)[:, None, None]
    query = torch.arange(R, device=device)[None, :, None]
    key = torch.arange(context_length + R, device=device)[None, None, :]
    return visibility(rows, context_length)(b, torch.zeros_like(b), query, key)[:, None]


def flex_mask(rows: Rows, context_length: int) -> BlockMask:
    """The same rule as a FlexAttention block mask (GPU); never materialised densely when compiled."""
    B, R = rows.ids.shape
    make = compiled_create_block_mask if rows.ids.is_cuda else create_block_mask
    return make(visibility(rows, context_length), B, None, R, context_length + R, device=rows.ids.device)


def anchor_counts(layouts: Sequence[Layout]) -> list[int]:
    """The distinct anchor counts k that the layouts hold, ascending (recorded in `mdflash_config`)."""
    return sorted({k for layout in layouts for k in layout.branches})
