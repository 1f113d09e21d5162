"""Packed texts and both layouts of windows: the same windows, loss and gradients; nobody sees another text."""

from types import SimpleNamespace

import pytest
import torch
from conftest import make_drafter, make_target

from mdflash.chat import Sample
from mdflash.drafter import Layout, Rows
from mdflash.drafter.tree import WINDOWS, dense_mask, flex_mask
from mdflash.training import STAGE_WEIGHTS, DrafterForTraining, WindowDataset
from mdflash.training.windows import PADDING, fill_rows

D = 3
LAYOUTS = {name: make(D) for name, make in WINDOWS.items()}
LENGTHS = (40, 9, 23, 12, 31)  # texts; the answers begin at 5 and end one token before the text


def samples(seed=0) -> list[Sample]:
    generator = torch.Generator().manual_seed(seed)
    texts = [tuple(torch.randint(0, 90, (length,), generator=generator).tolist()) for length in LENGTHS]
    return [Sample(f"s{i}", text, ((5, len(text) - 1),)) for i, text in enumerate(texts)]


def batch(layouts, pack_to=0, starts=4, texts=None):
    dataset = WindowDataset(texts or samples(), layouts, starts, seed=2, pack_to=pack_to)
    return dataset.collate([dataset[(0, i)] for i in [*range(len(dataset)), PADDING]])


def module_for(target, layouts):
    drafter = make_drafter(target, d=D)
    drafter.embed_tokens.weight.data = target.embed_tokens.weight.clone()
    drafter.lm_head.weight.data = target.lm_head.weight.clone()
    return DrafterForTraining(drafter.freeze(), target, layouts, STAGE_WEIGHTS["mdflash"], 10_000, bf16=False)


def loss_and_gradients(module, inputs):
    module.zero_grad()
    loss = module(**inputs)
    loss.backward()
    return loss.item(), torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])


def windows_of(layouts, inputs, texts) -> dict[tuple[int, int, int], tuple[tuple[int, int], list[float]]]:
    """(text, p, k) of every window with a label -> its place (context, window) in the batch and its weights."""
    trees = inputs["start"].shape[1] // len(layouts)
    contexts = inputs["ids"].view(len(inputs["start"]), -1)
    order = [(g * trees + n, k) for g, layout in enumerate(layouts) for n in range(trees) for k in layout.branches]
    found = {}
    for b, w in (inputs["weight"].sum(-1) > 0).nonzero().tolist():
        tree, k = order[w]
        first = inputs["first"][b, tree] if "first" in inputs else 0
        text = next(i for i, t in enumerate(texts) if contexts[b, first : first + len(t.ids)].tolist() == list(t.ids))
        found[text, inputs["start"][b, tree].item(), k] = ((b, w), inputs["weight"][b, w].tolist())
    return found


def test_rows_are_few_and_evenly_filled():
    assert fill_rows([3, 2, 1], 6) == [[0, 1, 2]]
    assert sorted(map(sorted, fill_rows([4, 3, 3, 2], 6))) == [[0, 3], [1, 2]]
    assert fill_rows([9, 2], 6) == [[0], [1]]  # a text longer than the limit: the limit is its length
    assert sorted(map(sorted, fill_rows([5, 5, 5], 9))) == [[0], [1], [2]]


def test_packed_batch_by_hand():
    texts = [Sample("a", (1, 2, 3, 4, 5, 6), ((2, 6),)), Sample("b", (7, 8, 9, 10), ((1, 4),))]
    made = WindowDataset(texts, LAYOUTS["trees"], 99, 0, pack_to=12)
    packed = made.collate([made[(0, 1)], made[(0, 0)], made[(0, PADDING)]])
    assert packed["ids"].tolist() == [[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 0]]  # longest first; the empty text last
    assert packed["positions"].tolist() == [[0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 0]]
    assert packed["start"].tolist() == [[2, 3, 1]]
    assert packed["first"].tolist() == [[0, 0, 6]]
    two_rows = WindowDataset(texts, LAYOUTS["trees"], 99, 0, pack_to=6)
    packed = two_rows.collate([two_rows[(0, 0)], two_rows[(0, 1)]])
    assert packed["positions"].tolist() == [[0, 1, 2, 3, 4, 5]] * 2  # padding counts on
    assert packed["start"].tolist() == [[2, 3, 1]]  # all rows are one context: nothing is padded
    assert packed["first"].tolist() == [[0, 0, 6]]


def test_context_columns_of_a_packed_text():
    layout = Layout.serial(2)
    ids = layout.token_ids(torch.zeros(1, 2, 0, dtype=torch.long), 9)
    rows = Rows.build(layout, torch.tensor([[2, 1]]), ids, torch.tensor([[0, 4]]))
    seen = dense_mask(rows, 6)[0, 0].int().tolist()
    assert seen == [[1, 1, 0, 0, 0, 0, 1, 1, 0, 0]] * 2 + [[0, 0, 0, 0, 1, 0, 0, 0, 1, 1]] * 2
    assert rows.position[0].tolist() == [2, 3, 1, 2]


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("pack_to", [1000, 50])
def test_packing_draws_the_same_windows(name, pack_to):
    """Every text keeps its own starts and weights; none starves."""
    layouts, texts = LAYOUTS[name], samples()
    padded, packed = (windows_of(layouts, batch(layouts, to), texts) for to in (0, pack_to))
    assert {key: weights for key, (_, weights) in padded.items()} == {
        key: weights for key, (_, weights) in packed.items()
    }
    assert {text for text, _, _ in packed} == set(range(len(LENGTHS)))


@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_packed_loss_and_gradients_equal_padded(family, name):
    module = module_for(make_target(family), LAYOUTS[name])
    loss, gradients = loss_and_gradients(module, batch(LAYOUTS[name]))
    for pack_to, rows in ((1000, 1), (50, 3)):  # one row; rows of several texts with padding behind
        inputs = batch(LAYOUTS[name], pack_to)
        assert len(inputs["ids"]) == rows
        packed_loss, packed_gradients = loss_and_gradients(module, inputs)
        assert packed_loss == pytest.approx(loss, rel=1e-6)
        torch.testing.assert_close(packed_gradients, gradients, atol=1e-6 * gradients.abs().max().item(), rtol=1e-4)


@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_another_text_in_the_row_changes_no_bit(family, name):
    """Text 2's loss and gradients while every other text of its row changes."""
    module, figures = module_for(make_target(family), LAYOUTS[name]), []
    texts = samples()
    others = [text if i == 2 else other for i, (text, other) in enumerate(zip(texts, samples(seed=1), strict=True))]
    for row in (texts, others):
        inputs = batch(LAYOUTS[name], 1000, texts=row)
        keep = torch.zeros_like(inputs["weight"])
        for (text, _, _), (place, _) in windows_of(LAYOUTS[name], inputs, row).items():
            keep[place] = text == 2
        inputs["weight"] *= keep
        assert inputs["weight"].sum() > 0
        figures.append(loss_and_gradients(module, inputs))
    assert figures[0][0] == figures[1][0]
    assert torch.equal(figures[0][1], figures[1][1])


@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize("attention", ["sdpa", "eager", "flash_attention_2"])
def test_a_packed_target_pass_equals_separate_ones(family, attention, monkeypatch):
    """flash-attn reads restarts in a batch of one only: there the rows go in as one (played by SDPA here)."""
    target, texts = make_target(family), samples()
    if attention == "flash_attention_2":
        monkeypatch.setattr(type(target), "config", SimpleNamespace(_attn_implementation=attention))
    else:
        target.model.set_attn_implementation(attention)
    inputs = batch(LAYOUTS["trees"], 50)
    out = target.forward(inputs["ids"], (-1, 1), inputs["positions"])
    assert out.features.shape == (*inputs["ids"].shape, 2 * 32)
    features, states, flat = out.features.flatten(0, 1), out.hidden.flatten(0, 1), inputs["ids"].flatten().tolist()
    for text in texts:
        at = next(at for at in range(len(flat)) if flat[at : at + len(text.ids)] == list(text.ids))
        alone = target.forward(torch.tensor([text.ids]), (-1, 1))
        torch.testing.assert_close(features[at : at + len(text.ids)], alone.features[0], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(states[at : at + len(text.ids)], alone.hidden[0], atol=1e-5, rtol=1e-5)


def test_a_target_that_mixes_packed_texts_is_refused(monkeypatch):
    target = make_target()
    target.check_packing()
    forward = target.decoder.forward
    monkeypatch.setattr(target.decoder, "forward", lambda position_ids=None, **rest: forward(**rest))
    with pytest.raises(ValueError, match="see each other"):
        target.check_packing()


@pytest.mark.parametrize("name", LAYOUTS)
@torch.no_grad()
def test_a_window_of_any_layout_equals_the_window_alone(name, target):
    """Packed or not, each window gives the hidden states of a text cut at its start and a layout of its own."""
    layouts, texts = LAYOUTS[name], samples()
    module = module_for(target, layouts)
    taps, mask_token = module.drafter.config.target_layer_ids, module.drafter.config.mask_token_id
    for pack_to in (0, 50):
        inputs, captured = batch(layouts, pack_to), []

        def spy(ids, rows, slots_of, weight, hidden, states, captured=captured):
            captured.append(rows.windows(hidden))
            return DrafterForTraining._windows(ids, rows, slots_of, weight, hidden, states)

        module._windows = spy
        module(**inputs)
        found = windows_of(layouts, inputs, texts)
        assert len(found) >= 18
        for (text, p, k), (place, _) in found.items():
            ids, alone = torch.tensor([texts[text].ids]), Layout.single(k, D)
            bonus = ids[:, p : p + 1, None] if k == 0 else None
            row_ids = alone.token_ids(ids[:, None, p : p + k], mask_token, bonus)
            rows = Rows.build(alone, torch.tensor([[p]]), row_ids)
            expected = rows.windows(module.drafter(target.features(ids, taps)[:, :p], rows))
            torch.testing.assert_close(captured[0][place], expected[0, 0], atol=2e-5, rtol=1e-4)


def test_independent_windows_are_balanced_over_k():
    """Hand counts: an answer of 20 tokens from 10 holds 20 - k - 1 starts with a label for k anchors."""
    text = Sample("s", tuple(range(40)), ((10, 30),))
    few = WindowDataset([text], LAYOUTS["independent"], 6, seed=0)[(0, 0)]
    assert [len(starts) for starts in few.starts] == [6, 6, 6, 6]
    assert [(weight.sum(-1) > 0).sum().item() for weight in few.weights] == [6, 6, 6, 6]
    assert len({tuple(starts.tolist()) for starts in few.starts}) == 4  # each k has starts of its own
    every = WindowDataset([text], LAYOUTS["independent"], 99, seed=0)[(0, 0)]
    assert [len(starts) for starts in every.starts] == [18, 17, 16, 15]
    # trees: one start for all k, so late starts have no label for many anchors
    (weight,) = WindowDataset([text], LAYOUTS["trees"], 99, seed=0)[(0, 0)].weights
    assert (weight.sum(-1) > 0).sum(0).tolist() == [18, 17, 16, 15]
    both = [batch(LAYOUTS[name], starts=6)["weight"].shape for name in ("trees", "independent")]
    assert both[0] == both[1] == (6, 6 * 4, 3)


def test_dense_equals_flex_on_joined_packed_rows():
    inputs = batch(LAYOUTS["independent"], 1000)
    parts = [
        Rows.build(layout, start, layout.token_ids(torch.zeros(*start.shape, layout.spine, dtype=torch.long), 9), first)
        for layout, start, first in zip(
            LAYOUTS["independent"], inputs["start"].chunk(4, 1), inputs["first"].chunk(4, 1), strict=True
        )
    ]
    rows, context = Rows.join(parts), inputs["ids"].shape[1]
    assert rows.tree[0].unique().tolist() == list(range(inputs["start"].shape[1]))
    dense, block = dense_mask(rows, context)[0, 0], flex_mask(rows, context)
    R = rows.ids.shape[1]
    query, key = torch.arange(R)[:, None], torch.arange(context + R)[None]
    assert torch.equal(block.mask_mod(torch.tensor(0), torch.tensor(0), query, key), dense)
    assert dense.any(1).all()


@pytest.mark.gpu
@pytest.mark.parametrize("name", LAYOUTS)
def test_packed_flex_training_equals_padded_on_a_gpu(name):
    target = make_target(hidden=64)
    target.model.to("cuda")
    module, figures = module_for(target, LAYOUTS[name]).to("cuda"), []
    module.drafter.attention = "flex"
    for pack_to in (0, 50, 1000):
        inputs = {key: value.to("cuda") for key, value in batch(LAYOUTS[name], pack_to).items()}
        figures.append(loss_and_gradients(module, inputs))
    for loss, gradients in figures[1:]:
        assert loss == pytest.approx(figures[0][0], rel=1e-4)
        torch.testing.assert_close(gradients, figures[0][1], atol=2e-3, rtol=2e-3)
