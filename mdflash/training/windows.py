"""Which windows a text teaches, and the batches made of them. Shape legend: drafter/tree.py; b branches of a tree,
L tokens of a text.

A start p and an anchor count k make one window: anchors p..p+k-1, slots predicting p+k+1..p+k+d, the bonus token p+k as
y_0 (docs/method.md). A tree at p holds one window for every k of its layout.
"""

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler

from ..chat import Sample
from ..drafter import Layout
from ..drafter.tree import WINDOWS
from ..recipe import Recipe, StageSection

# An item of the sampler: (epoch, sample index), or PADDING to fill the last global batch with a text without windows.
Key = tuple[int, int]
PADDING = -1
NO_WINDOWS = Sample("", (0,), ())


@dataclass(frozen=True)
class Mix:
    """What windows are made of beyond the paper's, drawn anew for every text and epoch.

    in_flight_taps: how many of the anchors' earliest taps are in flight; one count is drawn for each text. known_bonus: the
    share of windows with anchors whose first slot carries the bonus token (a serial window's always does). spine: weight of
    an anchor's own prediction of the token behind it, beside a first slot's 1. slot_decay: slots over which a window's weights
    fall to 1/e; the paper's is 4.
    """

    in_flight_taps: tuple[int, ...] = (0,)
    known_bonus: float = 0.0
    spine: float = 0.0
    slot_decay: float = 4.0

    @classmethod
    def of(cls, settings: StageSection) -> "Mix":
        """A stage's."""
        return cls(tuple(settings.in_flight_taps), settings.known_bonus, settings.spine_loss, settings.slot_decay)

    @property
    def in_flight(self) -> float:
        """Share of texts with taps in flight."""
        return sum(taps > 0 for taps in self.in_flight_taps) / len(self.in_flight_taps)


@dataclass(frozen=True)
class Item:
    """One text: ids [L], taps in flight and, for each layout, its starts [n], their windows' weights m·w [n, b, d], whether
    these know the bonus [n, b], and their anchors' weights [n, spine]."""

    ids: Tensor
    taps: int
    starts: list[Tensor]
    weights: list[Tensor]
    known: list[Tensor]
    spines: list[Tensor]


def keyed_generator(*key: object) -> torch.Generator:
    """A generator that depends on nothing but its key, such as (seed, epoch, sample id)."""
    digest = hashlib.sha256("/".join(map(str, key)).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def stage_layouts(recipe: Recipe, d: int) -> tuple[Layout, ...]:
    """The windows that the recipe's stage trains, `starts_per_text` trees of each a text."""
    if recipe.stage != "mdflash":
        return (Layout.serial(d),)
    return WINDOWS[recipe.mdflash.windows](d) + ((Layout.serial(d),) if recipe.mdflash.serial_windows else ())


def span_ends(sample: Sample) -> Tensor:
    """[T]: for an assistant token the end (exclusive) of its span, 0 elsewhere."""
    ends = torch.zeros(len(sample.ids), dtype=torch.long)
    for start, end in sample.spans:
        ends[start:end] = end
    return ends


def draw_starts(sample: Sample, layout: Layout, count: int, generator: torch.Generator) -> Tensor:
    """Up to `count` distinct starts p, ascending. A start is an assistant token (decoding never starts earlier) whose
    shortest window has at least one label inside the same span."""
    ends, positions = span_ends(sample), torch.arange(len(sample.ids))
    candidates = positions[positions + min(layout.branches) + 1 < ends]
    chosen = torch.randperm(len(candidates), generator=generator)[:count]
    return candidates[chosen].sort().values


def label_weights(sample: Sample, layout: Layout, starts_N: Tensor, decay: float = 4.0) -> Tensor:
    """m_i * w_i, [N, b, d]: w_i = exp(-(i-1)/decay); m_i = 1 while label p+k+i is inside the start's span."""
    k_b, i_d = torch.tensor(layout.branches), torch.arange(1, layout.d + 1)
    label_Nbd = starts_N[:, None, None] + k_b[:, None] + i_d
    inside = label_Nbd < span_ends(sample)[starts_N][:, None, None]
    return inside * torch.exp(-(i_d - 1) / decay)


def spine_weights(sample: Sample, layout: Layout, starts_N: Tensor, weight: float) -> Tensor:
    """[N, spine]: `weight` where the token behind anchor j, p+j+1, is inside the start's span."""
    label_Ns = starts_N[:, None] + torch.arange(1, layout.spine + 1)
    return weight * (label_Ns < span_ends(sample)[starts_N][:, None]).float()


def known_bonuses(layout: Layout, starts_N: Tensor, share: float, generator: torch.Generator) -> Tensor:
    """[N, b]: whether a window's first slot carries the bonus; always without anchors, else a share of them."""
    serial = (torch.tensor(layout.branches) == 0).expand(len(starts_N), -1)
    return serial | (torch.rand(serial.shape, generator=generator) < share) if share else serial


def fill_rows(lengths: Sequence[int], limit: int) -> list[list[int]]:
    """Texts of each row: as few rows of at most `limit` tokens (or the longest text) as hold them, evenly filled (longest
    first, each into the emptiest row)."""
    limit = max(limit, *lengths)
    for count in range(math.ceil(sum(lengths) / limit), len(lengths) + 1):
        rows, filled = [[] for _ in range(count)], [0] * count
        for text in sorted(range(len(lengths)), key=lambda text: -lengths[text]):
            row = filled.index(min(filled))
            rows[row].append(text)
            filled[row] += lengths[text]
        if max(filled) <= limit:
            return rows
    raise AssertionError("a row for every text holds them")


def padded(rows: Sequence[Tensor], length: int) -> Tensor:
    """Tensors [n, ...] as [B, length, ...], zeros behind each."""
    out = rows[0].new_zeros(len(rows), length, *rows[0].shape[1:])
    for place, row in zip(out, rows, strict=True):
        place[: len(row)] = row
    return out


class WindowDataset(Dataset):
    """Texts with windows drawn anew each epoch, keyed by (seed, epoch, sample id): a resumed or re-sharded run draws the
    same ones, packed or not.

    starts_per_text: starts drawn for each layout. pack_to: tokens of a row that holds several texts; 0 pads each text to the
    longest instead. Packing moves windows, it draws and drops none: a micro-batch of m texts has at most
    m * starts_per_text trees of a layout either way, and every text its own.
    """

    def __init__(
        self, samples: Sequence[Sample], layouts: Sequence[Layout], starts_per_text: int, seed: int, pack_to: int = 0,
        mix: Mix = Mix(),
    ):  # fmt: skip
        self.samples, self.layouts, self.starts_per_text, self.seed = samples, layouts, starts_per_text, seed
        self.pack_to, self.mix = pack_to, mix

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, key: Key) -> Item:
        """One text and its windows, by layout."""
        epoch, index = key
        sample = NO_WINDOWS if index == PADDING else self.samples[index]
        generator = keyed_generator(self.seed, epoch, sample.id)
        starts = [draw_starts(sample, layout, self.starts_per_text, generator) for layout in self.layouts]
        pairs, mix = list(zip(self.layouts, starts, strict=True)), self.mix
        known = [known_bonuses(*pair, mix.known_bonus, generator) for pair in pairs]
        taps = mix.in_flight_taps[int(torch.randint(len(mix.in_flight_taps), (), generator=generator))]
        return Item(
            torch.tensor(sample.ids),
            taps,
            starts,
            weights=[label_weights(sample, *pair, mix.slot_decay) for pair in pairs],
            known=known,
            spines=[spine_weights(sample, *pair, mix.spine) for pair in pairs],
        )

    def collate(self, items: Sequence[Item]) -> dict[str, Tensor]:
        """A micro-batch: ids [B, T], and for each of the drafter's contexts the trees' starts [B, N] (layout behind layout, as
        many for each), their windows' weights [B, W, d] (in the order of `Rows.windows`; 0 for padding) and which of these
        know the bonus [B, W]. By the mix, too: the trees' taps in flight [B, N] and the anchors' weights [B, A] (in the order
        of `Rows.anchors`).

        Padded texts are a row and a context each. Packed texts share rows, where `positions` [B, T] restart at each text, and
        all rows together are one context, where a tree's text begins at column `first` [1, N].
        """
        lengths = [len(item.ids) for item in items]
        rows = fill_rows(lengths, self.pack_to) if self.pack_to else [[text] for text in range(len(items))]
        T = max(sum(lengths[text] for text in row) for row in rows)
        contexts = [[text for row in rows for text in row]] if self.pack_to else rows
        layouts = range(len(self.layouts))
        most = max(sum(len(items[text].starts[g]) for text in texts) for texts in contexts for g in layouts)

        def by_layout(values: Sequence[Sequence[Tensor]]) -> list[Tensor]:
            """values[text][layout] [n, ...] -> [B, N, ...] of each layout."""
            return [
                padded([torch.cat([values[text][g] for text in texts]) for texts in contexts], max(1, most))
                for g in layouts
            ]

        def windows(values: Sequence[Sequence[Tensor]]) -> Tensor:
            return torch.cat([part.flatten(1, 2) for part in by_layout(values)], 1)

        def per_tree(values: Sequence[int]) -> Tensor:
            return torch.cat(
                by_layout(
                    [[torch.full_like(s, v) for s in item.starts] for item, v in zip(items, values, strict=True)]
                ),
                1,
            )

        batch = {
            "ids": padded([torch.cat([items[text].ids for text in row]) for row in rows], T),
            "start": torch.cat(by_layout([item.starts for item in items]), 1),
            "weight": windows([item.weights for item in items]),
            "known": windows([item.known for item in items]),
        }
        if any(self.mix.in_flight_taps):
            batch["taps"] = per_tree([item.taps for item in items])
        if self.mix.spine:
            batch["spine_weight"] = windows([item.spines for item in items])
        if not self.pack_to:
            return batch
        positions, first = torch.arange(T).repeat(len(rows), 1), {}
        for number, row in enumerate(rows):
            for text, column in zip(row, accumulate((lengths[text] for text in row), initial=0), strict=False):
                positions[number, column:] = torch.arange(T - column)  # padding counts on behind the last text
                first[text] = number * T + column
        return batch | {"positions": positions, "first": per_tree([first[text] for text in range(len(items))])}


def total_weight(batch: dict[str, Tensor]) -> Tensor:
    """The loss's denominator of a batch: Σ m_i w_i over all that carries loss."""
    weight = batch["weight"].sum()
    return weight + batch["spine_weight"].sum() if "spine_weight" in batch else weight


class EpochSampler(Sampler):
    """Keys (epoch, index) in an order keyed by (seed, epoch), padded to whole global batches: no text is dropped or seen
    twice in an epoch, on any number of ranks. `shuffle` false keeps file order (held-out data)."""

    def __init__(self, size: int, multiple_of: int, seed: int, shuffle: bool = True):
        self.size, self.seed, self.shuffle, self.epoch = size, seed, shuffle, 0
        self.padded = math.ceil(size / multiple_of) * multiple_of

    def set_epoch(self, epoch: int) -> None:
        """Called by the Trainer before each pass."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.padded

    def __iter__(self) -> Iterator[Key]:
        order = torch.arange(self.size)
        if self.shuffle:
            order = torch.randperm(self.size, generator=keyed_generator(self.seed, "order", self.epoch))
        for index in [*order.tolist(), *[PADDING] * (self.padded - self.size)]:
            yield (self.epoch, index)
