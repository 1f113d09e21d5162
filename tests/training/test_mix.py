"""Windows beyond the paper: taps in flight, known bonuses, serial windows, the spine's own loss."""

import pytest
import torch
from conftest import lend, make_drafter, make_target

from mdflash.chat import Sample
from mdflash.drafter import Layout, Rows
from mdflash.drafter.tree import dense_mask, in_flight_columns
from mdflash.training import STAGE_WEIGHTS, DrafterForTraining, Mix, WindowDataset
from mdflash.training.windows import total_weight

D = 3
LAYOUTS = (Layout.tree(D), Layout.serial(D))


def samples() -> list[Sample]:
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(90, (length,), generator=generator).tolist() for length in (18, 25, 14)]
    return [Sample(str(i), tuple(ids), ((6, len(ids)),)) for i, ids in enumerate(texts)]


def batch_of(mix: Mix, pack_to: int = 0, layouts=LAYOUTS) -> dict:
    dataset = WindowDataset(samples(), layouts, 3, 5, pack_to, mix)
    return dataset.collate([dataset[(0, i)] for i in range(3)])


def module_of(target, layouts=LAYOUTS) -> DrafterForTraining:
    drafter = lend(make_drafter(target), target).freeze()
    return DrafterForTraining(drafter, target, layouts, STAGE_WEIGHTS["mdflash"], 64, bf16=False)


def test_in_flight_columns_by_hand():
    """d = 2, p = 1, two trees: an anchor's column is seen by whoever sees the anchor, in the tree with taps alone."""
    layout = Layout.tree(2)
    start = torch.tensor([[1, 2]])
    ids = layout.token_ids(torch.zeros(1, 2, 3, dtype=torch.long), 9)
    rows = Rows.build(layout, start, ids, taps_BN=torch.tensor([[1, 0]]))
    assert in_flight_columns(rows) == 6
    mask = dense_mask(rows, 4)[0, 0].int()
    flying, own = mask[:, 4:10], mask[:, 10:]
    seen = [[1, 0, 0], [1, 1, 0], [1, 1, 1], *[[1, 0, 0]] * 2, *[[1, 1, 0]] * 2, *[[1, 1, 1]] * 2]
    assert flying[:9].tolist() == [row + [0, 0, 0] for row in seen]
    assert not flying[9:].any()
    plain = dense_mask(Rows.build(layout, start, ids), 4)[0, 0].int()
    assert torch.equal(mask[:, :4], plain[:, :4])
    assert torch.equal(own, plain[:, 4:])


@torch.no_grad()
def test_in_flight_features_are_the_earliest_taps_alone():
    """What lies in the later taps of an anchor, or in a later anchor, changes nothing; what lies in the earlier ones does.
    All taps of the anchors in flight are the features of a start at p+k."""
    drafter = make_drafter(make_target())
    layout, p, width = Layout.single(2, D), 5, drafter.config.hidden_size
    features = torch.randn(1, 9, drafter.feature_width)
    block = torch.randint(90, (1, 1, 2))

    def hidden(features, taps):
        ids = layout.token_ids(block, drafter.config.mask_token_id)
        taps = None if taps is None else torch.tensor([[taps]])
        rows = Rows.build(layout, torch.tensor([[p]]), ids, taps_BN=taps)
        return rows.windows(drafter(features, rows))

    without = hidden(features, None)
    torch.testing.assert_close(hidden(features, 0), without, atol=1e-6, rtol=0)
    one = hidden(features, 1)
    assert not torch.allclose(one, without, atol=1e-4)
    later = features.clone()
    later[:, p : p + 2, width:] += 1
    later[:, p + 2 :] += 1
    assert torch.equal(hidden(later, 1), one)
    later[:, p + 1, 0] += 1
    assert not torch.allclose(hidden(later, 1), one, atol=1e-5)


@pytest.mark.parametrize("pack_to", [0, 60])
def test_a_mixed_batch_is_its_texts_one_by_one(pack_to):
    """Taps, known bonuses, serial windows and the spine's loss: a batch, packed or padded, gives the sum of its texts."""
    mix, target = Mix((0, 1, 2), 0.5, 0.5), make_target()
    module = module_of(target)
    whole = batch_of(mix, pack_to)
    assert len(set(whole["taps"].flatten().tolist())) > 1
    assert 0 < whole["known"].float().mean() < 1
    dataset = WindowDataset(samples(), LAYOUTS, 3, 5, 0, mix)
    parts = [dataset.collate([dataset[(0, i)]]) for i in range(3)]
    assert total_weight(whole).item() == pytest.approx(sum(total_weight(part).item() for part in parts))
    assert module(**whole).item() == pytest.approx(sum(module(**part).item() for part in parts), rel=1e-5)


def test_the_mix_off_is_the_paper_bit_for_bit():
    """Count 0 alone, no known bonus, no spine loss: the same windows and the same loss as without the mix."""
    target = make_target()
    plain, off = batch_of(Mix(), layouts=LAYOUTS[:1]), batch_of(Mix((0,), 0.0, 0.0), layouts=LAYOUTS[:1])
    assert plain.keys() == off.keys() == {"ids", "start", "weight", "known"}
    assert not plain["known"].any()
    module = module_of(target, LAYOUTS[:1])
    assert module(**plain).item() == module(**off).item()
    flying = batch_of(Mix((0, 1)), layouts=LAYOUTS[:1])
    assert torch.equal(flying["start"], plain["start"])
    flying["taps"].zero_()
    assert module(**flying).item() == pytest.approx(module(**plain).item(), rel=1e-6)


def test_spine_slots_predict_the_token_behind_them():
    """The loss's spine part against plain windows of one anchor's own: hand-picked rows, labels and teachers."""
    target = make_target()
    module = module_of(target, LAYOUTS[:1])
    batch = batch_of(Mix(spine=0.5), layouts=LAYOUTS[:1])
    found = []

    def spy(ids, rows, slots_of, weight, hidden, states):
        found.append(DrafterForTraining._windows(ids, rows, slots_of, weight, hidden, states))
        return found[-1]

    module._windows = spy
    module(**batch)
    spine = found[1]
    assert spine.labels.shape[1] == 1
    expected = []
    for text, sample in enumerate(samples()):
        for start in batch["start"][text].tolist():
            expected += [
                (sample.ids[start + j], sample.ids[start + j + 1])
                for j in range(D + 1)
                if start and start + j + 1 < len(sample.ids)
            ]
    assert list(zip(spine.previous[:, 0].tolist(), spine.labels[:, 0].tolist(), strict=True)) == expected
    assert set(spine.weight.flatten().tolist()) == {0.5}


def test_a_known_bonus_stands_in_the_first_slot():
    target = make_target()
    module = module_of(target)
    batch = batch_of(Mix(known_bonus=1.0))
    rows = module._rows(batch["ids"], batch["start"], torch.zeros_like(batch["start"]), batch["known"], None)
    slots, at = rows.windows(rows.ids), rows.windows(rows.position)
    mask = module.drafter.config.mask_token_id
    for b, w in batch["known"].nonzero().tolist():
        assert slots[b, w].tolist() == [
            batch["ids"][b, at[b, w, 0].clamp(max=batch["ids"].shape[1] - 1)].item(),
            mask,
            mask,
        ]
