"""Windows: starts, labels, keyed draws, padding; by hand."""

import pytest
import torch

from mdflash.chat import Sample
from mdflash.drafter import Layout
from mdflash.training.windows import PADDING, EpochSampler, WindowDataset, draw_starts, keyed_generator, label_weights

SAMPLE = Sample("s", tuple(range(20)), ((4, 12), (15, 18)))


def test_starts_lie_in_the_answer_and_have_a_label():
    tree, serial = Layout.tree(3), Layout.serial(3)
    assert draw_starts(SAMPLE, tree, 99, keyed_generator(0)).tolist() == [4, 5, 6, 7, 8, 9, 15]
    assert draw_starts(SAMPLE, serial, 99, keyed_generator(0)).tolist() == [4, 5, 6, 7, 8, 9, 10, 15, 16]
    drawn = draw_starts(SAMPLE, tree, 3, keyed_generator(1)).tolist()
    assert len(drawn) == len(set(drawn)) == 3
    assert drawn == sorted(drawn)


def test_label_weights_by_hand():
    w = [1.0, torch.exp(torch.tensor(-0.25)).item(), torch.exp(torch.tensor(-0.5)).item()]
    weight = label_weights(SAMPLE, Layout.tree(3), torch.tensor([4, 9]))
    assert weight.shape == (2, 4, 3)
    # p=4, k=4: labels 9, 10, 11, all below the span's end 12; p=9, k=1: 11 only; p=9, k=2: 12 is outside
    assert weight[0, 3].tolist() == pytest.approx(w)
    assert weight[1, 0].tolist() == pytest.approx([w[0], 0, 0])
    assert weight[1, 1:].sum() == 0
    # k=0 from 15: labels 16, 17 in the second span, 18 outside it
    assert label_weights(SAMPLE, Layout.serial(3), torch.tensor([15]))[0, 0].tolist() == pytest.approx([w[0], w[1], 0])
    faster = label_weights(SAMPLE, Layout.tree(3), torch.tensor([4]), decay=2.0)
    assert faster[0, 3].tolist() == pytest.approx([w[0], w[2], w[2] ** 2])


def test_draws_are_keyed_by_seed_epoch_and_sample():
    dataset = WindowDataset([SAMPLE], (Layout.tree(3),), 2, seed=5)
    (first,) = dataset[(0, 0)].starts
    assert torch.equal(first, WindowDataset([SAMPLE], (Layout.tree(3),), 2, seed=5)[(0, 0)].starts[0])
    others = [dataset[(epoch, 0)].starts[0].tolist() for epoch in range(1, 12)]
    assert any(other != first.tolist() for other in others)


def test_every_text_once_per_epoch_and_padding_without_windows():
    sampler = EpochSampler(size=5, multiple_of=4, seed=1)
    keys = list(sampler)
    assert len(keys) == len(sampler) == 8
    assert sorted(index for _, index in keys) == [PADDING] * 3 + [0, 1, 2, 3, 4]
    sampler.set_epoch(1)
    assert [i for _, i in sampler] != [i for _, i in keys]
    assert {epoch for epoch, _ in sampler} == {1}
    dataset = WindowDataset([SAMPLE], (Layout.tree(3),), 2, seed=5)
    batch = dataset.collate([dataset[(0, PADDING)], dataset[(0, 0)]])
    assert batch["ids"].shape == (2, 20)
    assert batch["weight"].shape == (2, 2 * 4, 3)
    assert batch["weight"][0].sum() == 0
    assert dataset.collate([dataset[(0, PADDING)]])["start"].shape == (1, 1)
