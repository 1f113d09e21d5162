"""The FLOP count: against PyTorch's counter on the real modules, against the mask, and by hand for Qwen3 8B and 14B."""

import pytest
import torch
from conftest import FIXTURES, make_drafter, make_target
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen3Config

from mdflash import MDFlashConfig
from mdflash.drafter import Layout, Rows
from mdflash.drafter.model import HEADS_OF_DSPARK
from mdflash.drafter.tree import dense_mask
from mdflash.training.flops import count, count_text, drafter_part, layer_weights, visible_pairs

DRAFTER = dict(
    layer_types=None,
    num_hidden_layers=5,
    block_size=7,
    markov_rank=256,
    markov_head_type="vanilla",
    mask_token_id=151669,
)


def matmuls(work) -> int:
    """FLOPs of the matrix products in `work()`, attention aside (its kernel is counted apart, or not at all)."""
    with FlopCounterMode(display=False) as counter:
        work()
    return sum(flops for op, flops in counter.get_flop_counts()["Global"].items() if "mm" in str(op))


@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize("stage", ["mdflash", "dspark"])
def test_backbone_equals_the_counter(family, stage):
    target = make_target(family)
    drafter = make_drafter(target).freeze(HEADS_OF_DSPARK if stage == "mdflash" else ()).train()
    layout = Layout.tree(3) if stage == "mdflash" else Layout.serial(3)
    starts = [5, 20, 31]
    ids = torch.randint(0, 90, (1, 50))
    anchors = torch.zeros(1, len(starts), layout.spine, dtype=torch.long)
    rows = Rows.build(layout, torch.tensor([starts]), layout.token_ids(anchors, 96))
    flops = count(target.config, drafter.config, layout, 50, starts, stage)
    features = target.features(ids, drafter.config.target_layer_ids)
    hidden = drafter(features, rows)
    assert matmuls(lambda: target.forward(ids)) == flops["target_layers"]
    assert matmuls(lambda: drafter(features, rows)) == flops["context_forward"] + flops["rows_forward"]
    assert matmuls(hidden.sum().backward) == flops["context_backward"] + flops["rows_backward"]


def test_features_in_flight_equal_the_counter(target):
    """Columns for the anchors, backward through them, and the pairs that see them."""
    drafter, layout, starts = make_drafter(target).freeze().train(), Layout.tree(3), [5, 20, 31]
    anchors = torch.zeros(1, len(starts), layout.spine, dtype=torch.long)
    rows = Rows.build(
        layout, torch.tensor([starts]), layout.token_ids(anchors, 96), taps_BN=torch.full((1, len(starts)), 2)
    )
    flops = count(target.config, drafter.config, layout, 50, starts, in_flight=1.0)
    features, hidden = torch.randn(1, 50, drafter.feature_width), []
    forward = matmuls(lambda: hidden.append(drafter(features, rows)))
    assert forward == flops["context_forward"] + flops["in_flight_forward"] + flops["rows_forward"]
    backward = flops["context_backward"] + flops["in_flight_backward"] + flops["rows_backward"]
    assert matmuls(hidden[0].sum().backward) == backward
    assert visible_pairs(layout, 50, starts, 1.0) == drafter.mask(rows, 50).sum()
    assert visible_pairs(layout, 50, starts, 0.5) < visible_pairs(layout, 50, starts, 1.0)


def test_a_text_is_the_sum_of_its_layouts(target, drafter):
    """Trees, serial windows and the anchors' own labels; what the text alone costs is there once."""
    layouts = Layout.tree(3), Layout.serial(3)
    tree, serial = (count(target.config, drafter.config, layout, 50, 2) for layout in layouts)
    both = count_text(target.config, drafter.config, layouts, 50, [2, 2], spine_labels=True)
    assert both["target_layers"] == tree["target_layers"]
    assert both["context_backward"] == serial["context_backward"]
    assert both["rows_forward"] == tree["rows_forward"] + serial["rows_forward"]
    labels = 2 * (4 * 3 + 4 + 3)  # windows of the tree, its anchors, the serial window
    assert both["student_logits"] == 2 * labels * drafter.config.hidden_size * drafter.config.vocab_size
    assert both["in_flight_forward"] == 0
    trained = count(target.config, drafter.config, layouts[0], 50, 2, train_head=True)
    assert trained["heads_backward"] == 2 * trained["heads_forward"] > tree["heads_backward"]


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
@pytest.mark.parametrize("stage", ["mdflash", "dspark"])
def test_loss_equals_the_counter(target, head, stage):
    drafter = make_drafter(target, head=head).freeze(HEADS_OF_DSPARK if stage == "mdflash" else ())
    layout = Layout.tree(3) if stage == "mdflash" else Layout.serial(3)
    flops = count(target.config, drafter.config, layout, 50, 2, stage)
    hidden = torch.randn(2 * len(layout.branches), 3, 32, requires_grad=True)
    previous, outputs = torch.randint(0, 90, hidden.shape[:2]), []

    def forward():
        outputs.append((drafter.lm_head(hidden) + drafter.head.biases(previous, hidden)).sum())
        if stage == "dspark":
            outputs.append(drafter.confidence_logits(hidden, previous).sum())

    assert matmuls(lambda: target.logits(hidden)) == flops["teacher_logits"]
    assert matmuls(forward) == flops["student_logits"] + flops["heads_forward"]
    assert matmuls(sum(outputs).backward) == flops["student_logits_backward"] + flops["heads_backward"]


def test_attention_equals_the_counter():
    query, key = torch.randn(1, 4, 9, 8, requires_grad=True), torch.randn(1, 4, 30, 8, requires_grad=True)
    out = []
    forward = matmuls(lambda: out.append((query @ key.mT).softmax(-1) @ key))
    config = Qwen3Config(num_attention_heads=4, num_key_value_heads=4, head_dim=8, num_hidden_layers=1, hidden_size=32)
    flops = count(config, make_drafter(make_target()).config, Layout.serial(1), 30, [])
    assert forward * (30 * 31 // 2) == flops["target_attention"] * 9 * 30
    assert matmuls(out[0].sum().backward) == 2 * forward


@pytest.mark.parametrize("layout", [Layout.tree(3), Layout.serial(4), Layout(2, (2,), 3)])
def test_pairs_are_the_masks(layout):
    starts = [0, 7, 29]
    anchors = torch.zeros(1, 3, layout.spine, dtype=torch.long)
    rows = Rows.build(layout, torch.tensor([starts]), layout.token_ids(anchors, 1))
    assert visible_pairs(layout, 30, starts) == dense_mask(rows, 30).sum()
    assert visible_pairs(layout, 24, 3) == visible_pairs(layout, 24, [12, 12, 12])


@pytest.mark.parametrize(("size", "layers", "attention", "logits", "own"), [
    ("8b", 56.90, 4.95, 2.231, 22.1),
    ("14b", 108.23, 6.87, 2.789, 33.5),
])  # fmt: skip
def test_qwen3_by_hand(size, layers, attention, logits, own):
    """T = 4096, 32 trees of d = 7: 64 rows and 56 labels each."""
    target = Qwen3Config.from_pretrained(FIXTURES / f"qwen3_{size}.json")
    taps = {"8b": [1, 9, 17, 25, 33], "14b": [1, 10, 19, 28, 37]}[size]
    geometry = {"target_layer_ids": taps, "num_target_layers": target.num_hidden_layers}
    drafter = MDFlashConfig(**target.to_dict() | DRAFTER | geometry)
    flops = count(target, drafter, Layout.tree(7), 4096, 32)
    tera = {part: value / 1e12 for part, value in flops.items()}
    C, q = target.hidden_size, 128 * target.num_attention_heads
    weights = C * (q + 1024 + 1024 + q + 3 * target.intermediate_size)
    assert layer_weights(target) == weights
    assert flops["target_layers"] == 2 * 4096 * target.num_hidden_layers * weights
    assert flops["rows_forward"] == 2 * 2048 * 5 * weights
    assert flops["rows_backward"] == 2 * flops["rows_forward"]
    assert flops["context_forward"] == 2 * 4096 * (5 * C * C + 5 * C * 2048)
    assert flops["context_backward"] == 2 * 4096 * (5 * C * C + 2 * 5 * C * 2048)
    assert (
        flops["teacher_logits"] == flops["student_logits"] == flops["student_logits_backward"] == 2 * 1792 * C * 151936
    )
    assert flops["heads_forward"] == 2 * 1792 * 256 * 151936
    assert flops["heads_backward"] == 0
    assert tera["target_layers"] == pytest.approx(layers, rel=1e-3)
    assert tera["target_attention"] == pytest.approx(attention, rel=1e-2)
    assert tera["student_logits"] == pytest.approx(logits, rel=1e-3)
    assert drafter_part(flops) / 1e12 == pytest.approx(own, rel=1e-2)
    assert drafter_part(flops) == sum(flops.values()) - flops["target_layers"] - flops["target_attention"]


def test_dflash_has_neither_teacher_nor_heads(target):
    flops = count(target.config, make_drafter(target, rank=0).config, Layout.serial(3), 10, 1, "dflash")
    assert flops["teacher_logits"] == flops["heads_forward"] == flops["heads_backward"] == 0
    assert flops["student_logits"] > 0


@pytest.mark.parametrize(("length", "starts", "message"), [
    (0, 1, "length=0"), (10, -1, "starts=-1"), (10, [3, 10], r"use positions in 0\.\.9"),
])  # fmt: skip
def test_errors(target, drafter, length, starts, message):
    with pytest.raises(ValueError, match=message):
        count(target.config, drafter.config, Layout.tree(3), length, starts)
