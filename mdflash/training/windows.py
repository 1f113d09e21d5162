"""Which windows a text teaches, and the batches made of them. Shape legend: drafter/tree.py; b branches of a tree.

A start p and an anchor count k make one window: anchors p..p+k-1, slots predicting p+k+1..p+k+d, the bonus token p+k as
y_0 (docs/method.md). A tree at p holds one window for every k of its layout.
"""

import hashlib
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler

from ..chat import Sample
from ..drafter import Layout

# An item of the sampler: (epoch, sample index), or PADDING to fill the last global batch with a text without windows.
Key = tuple[int, int]
PADDING = -1


def keyed_generator(*key: object) -> torch.Generator:
    """A generator that depends on nothing but its key, such as (seed, epoch, sample id)."""
    digest = hashlib.sha256("/".join(map(str, key)).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


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


def label_weights(sample: Sample, layout: Layout, starts_N: Tensor) -> Tensor:
    """m_i * w_i, [N, b, d]: w_i = exp(-(i-1)/4); m_i = 1 while label p+k+i is inside the start's span."""
    k_b, i_d = torch.tensor(layout.branches), torch.arange(1, layout.d + 1)
    label_Nbd = starts_N[:, None, None] + k_b[:, None] + i_d
    inside = label_Nbd < span_ends(sample)[starts_N][:, None, None]
    return inside * torch.exp(-(i_d - 1) / 4)


class WindowDataset(Dataset):
    """Texts with windows drawn anew each epoch, keyed by (seed, epoch, sample id): a resumed or re-sharded run draws the
    same ones."""

    def __init__(self, samples: Sequence[Sample], layout: Layout, starts_per_text: int, seed: int):
        self.samples, self.layout, self.starts_per_text, self.seed = samples, layout, starts_per_text, seed

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, key: Key) -> dict[str, Tensor]:
        """ids [T], start [N], weight [N, b, d]; N <= starts_per_text."""
        epoch, index = key
        if index == PADDING:
            empty = torch.zeros(0, dtype=torch.long)
            weight = torch.zeros(0, len(self.layout.branches), self.layout.d)
            return {"ids": torch.zeros(1, dtype=torch.long), "start": empty, "weight": weight}
        sample = self.samples[index]
        generator = keyed_generator(self.seed, epoch, sample.id)
        starts = draw_starts(sample, self.layout, self.starts_per_text, generator)
        ids = torch.tensor(sample.ids)
        return {"ids": ids, "start": starts, "weight": label_weights(sample, self.layout, starts)}

    def collate(self, items: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
        """Right-padded batch: ids [B, T], start [B, N], weight [B, N, b, d]; padded trees have weight 0."""
        T, N = max(len(item["ids"]) for item in items), max(1, *(len(item["start"]) for item in items))
        ids, start = torch.zeros(len(items), T, dtype=torch.long), torch.zeros(len(items), N, dtype=torch.long)
        weight = torch.zeros(len(items), N, len(self.layout.branches), self.layout.d)
        for row, item in enumerate(items):
            ids[row, : len(item["ids"])] = item["ids"]
            start[row, : len(item["start"])] = item["start"]
            weight[row, : len(item["start"])] = item["weight"]
        return {"ids": ids, "start": start, "weight": weight}


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
