"""Windows, the DPara tree and who sees whom: the one rule, its dense mask and its FlexAttention mask.

Shape suffixes here and in the other tensor files:
B requests or texts · T context positions · R rows · N trees of one text · W windows · V vocabulary · F feature width ·
H heads · C channels (hidden size) · d draft length · A anchors

Every mode is the same window (docs/method.md): features at positions < p, then k
anchors (the true tokens p..p+k-1), then d slots at p+k..p+k+d-1. Windows with one start p share their anchors: a `Layout`
is a spine of anchors and one branch of d slots per anchor count k.
  serial DSpark / DFlash    spine 0, branches (0,)
  DPara tree                spine d+1, branches (1, .., d+1)
  one M-DFlash window       spine k, branches (k,)

Beyond the paper (docs/method.md): branches whose first slot carries a guessed bonus, and in-flight features, a key column for
every anchor from those taps of it that the verify pass has written already.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from ..compilation import compile_for_all_lengths

compiled_create_block_mask = compile_for_all_lengths(create_block_mask)


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
        if self.d < 1 or not self.rows or not all(0 <= k <= self.spine for k in self.branches):
            raise ValueError(
                f"Layout(spine={self.spine}, branches={self.branches}, d={self.d}): d >= 1, at least one row, and "
                "every anchor count within 0..spine"
            )

    @classmethod
    def serial(cls, d: int) -> "Layout":
        """The k=0 window: d slots, the first of which carries the bonus token."""
        return cls(0, (0,), d)

    @classmethod
    def tree(cls, d: int, guesses: int = 0) -> "Layout":
        """The DPara tree: spine t_0..t_d and, for each accepted count r = 0..d (k = r+1), a branch whose bonus is open and one
        for each of its guessed bonuses, in this order."""
        return cls(d + 1, tuple(k for k in range(1, d + 2) for _ in range(1 + guesses)), d)

    @classmethod
    def anchors(cls, d: int) -> "Layout":
        """The tree's spine alone."""
        return cls(d + 1, (), d)

    @classmethod
    def single(cls, k: int, d: int) -> "Layout":
        """One M-DFlash window on its own: k anchors and its d slots."""
        return cls(k, (k,), d)

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
    """Rows of trees for each of B contexts; a context is one text, or several packed behind one another.

    Attributes (int64 [B, R]): ids, position (in the row's own text), start (p of the row's tree: features below it are
    visible), first (the context column of its text's position 0), tree (which tree the row belongs to), seen and branch
    (see Layout). groups: layout and number of its trees, in the order of the rows. taps [B, R]: how many of the earliest
    taps of the tree's anchors are in flight (0: the tree sees none of its in-flight columns); None has no such columns.
    """

    ids: Tensor
    position: Tensor
    start: Tensor
    first: Tensor
    tree: Tensor
    seen: Tensor
    branch: Tensor
    groups: tuple[tuple[Layout, int], ...]
    taps: Tensor | None = None

    @classmethod
    def build(
        cls, layout: Layout, start_BN: Tensor, ids_BNR: Tensor, first_BN: Tensor | None = None,
        taps_BN: Tensor | None = None,
    ) -> "Rows":  # fmt: skip
        """Place `layout` at every start. start_BN: p of each tree; ids_BNR: its row ids (`Layout.token_ids`); first_BN: the
        column at which its text begins in the context (None: 0, texts are not packed); taps_BN: its taps in flight."""
        B, N = start_BN.shape

        def per_row(values: list[int]) -> Tensor:
            row = torch.tensor(values, device=start_BN.device)
            return row.expand(B, N, layout.rows).flatten(1)

        def per_tree(values_BN: Tensor) -> Tensor:
            return values_BN[..., None].expand(B, N, layout.rows).flatten(1)

        start = per_tree(start_BN)
        return cls(
            ids=ids_BNR.flatten(1),
            position=start + per_row(layout.offset),
            start=start,
            first=torch.zeros_like(start) if first_BN is None else per_tree(first_BN),
            tree=per_tree(torch.arange(N, device=start_BN.device).expand(B, N)),
            seen=per_row(layout.seen),
            branch=per_row(layout.branch),
            groups=((layout, N),),
            taps=None if taps_BN is None else per_tree(taps_BN),
        )

    @classmethod
    def join(cls, parts: Sequence["Rows"]) -> "Rows":
        """Rows of several layouts over the same contexts, part behind part, trees distinct. All have taps, or none."""
        before = [0, *accumulate(count for part in parts for _, count in part.groups)]
        parts = [replace(part, tree=part.tree + trees) for part, trees in zip(parts, before, strict=False)]
        tensors = [field.name for field in fields(cls) if field.name != "groups"]
        joined = {
            name: torch.cat([getattr(part, name) for part in parts], dim=1)
            for name in tensors
            if getattr(parts[0], name) is not None
        }
        return cls(**joined, groups=tuple(group for part in parts for group in part.groups))

    @property
    def anchors(self) -> Tensor:
        """The numbers [A] of the rows that are anchors, ascending."""
        before, found = 0, []
        for layout, count in self.groups:
            trees = torch.arange(count, device=self.ids.device)[:, None] * layout.rows
            found.append((before + trees + torch.arange(layout.spine, device=self.ids.device)).flatten())
            before += layout.rows * count
        return torch.cat(found)

    def windows(self, x_BR: Tensor) -> Tensor:
        """The slots' part of a per-row tensor, window by window: [B, R, ...] -> [B, W, d, ...]; anchors are dropped. Windows
        run group by group, tree by tree, branch by branch."""
        parts = x_BR.split([layout.rows * count for layout, count in self.groups], dim=1)
        slots = [
            part.unflatten(1, (count, layout.rows))[:, :, layout.spine :].flatten(1, 2).unflatten(1, (-1, layout.d))
            for part, (layout, count) in zip(parts, self.groups, strict=True)
        ]
        return torch.cat(slots, dim=1)

    def spines(self, x_BR: Tensor) -> Tensor:
        """The anchors' part of a per-row tensor, each a window of one slot: [B, R, ...] -> [B, A, 1, ...]."""
        return x_BR[:, self.anchors][:, :, None]

    def branches(self, x_BR: Tensor) -> Tensor:
        """`windows` of rows of one layout, by tree: [B, R, ...] -> [B, N, branches, d, ...]."""
        ((layout, count),) = self.groups
        return self.windows(x_BR).unflatten(1, (count, len(layout.branches)))


Rule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def visibility(rows: Rows, context_length: int) -> Rule:
    """THE visibility rule over keys [context ; in-flight ; rows], as a FlexAttention `mask_mod(b, h, query, key)`.

    A row sees its own text's features below its tree's start, the first `seen` anchors of its own tree, and all d slots
    of its own branch; nothing else (docs/method.md). A context column's index is its position, counted from `first`. An
    in-flight column (one for each anchor, where the rows have taps) is seen by whoever sees its anchor, in trees with taps.
    """
    flying = in_flight_columns(rows)
    behind, anchors = context_length + flying, rows.anchors if flying else None

    def rule(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        in_context = key < context_length
        other, arrived = (key - behind).clamp(min=0), True
        if flying:
            in_flight = key < behind
            other = torch.where(in_flight, anchors[(key - context_length).clamp(min=0, max=flying - 1)], other)
            arrived = ~in_flight | (rows.taps[b, query] > 0)
        same_tree = rows.tree[b, query] == rows.tree[b, other]
        is_anchor = rows.branch[b, other] < 0
        anchor_index = rows.position[b, other] - rows.start[b, other]
        sees_anchor = is_anchor & (anchor_index < rows.seen[b, query]) & arrived
        sees_slot = ~is_anchor & (rows.branch[b, other] == rows.branch[b, query])
        first = rows.first[b, query]
        sees_feature = (first <= key) & (key < first + rows.start[b, query])
        return torch.where(in_context, sees_feature, same_tree & (sees_anchor | sees_slot))

    return rule


def in_flight_columns(rows: Rows) -> int:
    """How many in-flight columns lie between context and rows: one for each anchor of rows with taps."""
    return 0 if rows.taps is None else sum(layout.spine * count for layout, count in rows.groups)


def dense_mask(rows: Rows, context_length: int) -> Tensor:
    """The rule as a boolean mask [B, 1, R, T+A+R] for `scaled_dot_product_attention` (reference, CPU)."""
    B, R = rows.ids.shape
    device = rows.ids.device
    b = torch.arange(B, device=device)[:, None, None]
    query = torch.arange(R, device=device)[None, :, None]
    key = torch.arange(context_length + in_flight_columns(rows) + R, device=device)[None, None, :]
    return visibility(rows, context_length)(b, torch.zeros_like(b), query, key)[:, None]


def flex_mask(rows: Rows, context_length: int) -> BlockMask:
    """The same rule as a FlexAttention block mask (GPU); never materialised densely when compiled."""
    B, R = rows.ids.shape
    make = compiled_create_block_mask if rows.ids.is_cuda else create_block_mask
    keys = context_length + in_flight_columns(rows) + R
    return make(visibility(rows, context_length), B, None, R, keys, device=rows.ids.device)


# The training setting `windows`: how the mdflash stage lays out its windows of k = 1..d+1 anchors; serial has none (a control).
WINDOWS: dict[str, Callable[[int], tuple[Layout, ...]]] = {
    "trees": lambda d: (Layout.tree(d),),
    "independent": lambda d: tuple(Layout.single(k, d) for k in range(1, d + 2)),
    "serial": lambda d: (Layout.serial(d),),
}


def anchor_counts(layouts: Sequence[Layout]) -> list[int]:
    """The distinct anchor counts k that the layouts hold, ascending (recorded in `mdflash_config`)."""
    return sorted({k for layout in layouts for k in layout.branches})
