"""Who sees whom: hand-computed rows, dense against FlexAttention, branches against single windows, perturbations."""

from dataclasses import replace

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from mdflash.drafter import Layout, Rows
from mdflash.drafter.backbone import attend
from mdflash.drafter.tree import dense_mask, flex_mask, in_flight_columns


def rows_of(layout: Layout, starts, mask_token=9) -> Rows:
    start = torch.tensor(starts)
    anchors = torch.zeros(*start.shape, layout.spine, dtype=torch.long)
    return Rows.build(layout, start, layout.token_ids(anchors, mask_token))


def test_tree_of_d3_by_hand():
    rows = rows_of(Layout.tree(3), [[2]])
    # spine t_0..t_3 at 2..5; branch r at 2+r+1..2+r+3
    assert rows.position[0].tolist() == [2, 3, 4, 5, 3, 4, 5, 4, 5, 6, 5, 6, 7, 6, 7, 8]
    mask = dense_mask(rows, 4)[0, 0].int()
    context, keys = mask[:, :4], mask[:, 4:]
    assert context.tolist() == [[1, 1, 0, 0]] * 16  # features at positions 0 and 1 only
    spine = [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]
    for j in range(4):
        assert keys[j].tolist() == spine[j] + [0] * 12
    for r in range(4):
        own = [0] * (3 * r) + [1] * 3 + [0] * (9 - 3 * r)
        for i in range(3):
            assert keys[4 + 3 * r + i].tolist() == spine[r] + own


def test_tree_of_d7_counts_and_positions():
    layout = Layout.tree(7)
    assert layout.rows == 64
    rows = rows_of(layout, [[5, 11]])
    mask = dense_mask(rows, 20)[0, 0].int()
    visible = mask.sum(1).tolist()
    for tree, p in enumerate((5, 11)):
        base = 64 * tree
        assert rows.position[0, base : base + 8].tolist() == list(range(p, p + 8))
        for r in range(8):
            slots = slice(base + 8 + 7 * r, base + 15 + 7 * r)
            assert rows.position[0, slots].tolist() == list(range(p + r + 1, p + r + 8))
            assert visible[slots] == [p + r + 1 + 7] * 7  # features, spine 0..r, own slots
        assert visible[base : base + 8] == [p + j + 1 for j in range(8)]
    assert mask[:64, 20 + 64 :].sum() == mask[64:, 20 : 20 + 64].sum() == 0  # trees do not see each other


def test_serial_window_sees_context_and_itself():
    rows = rows_of(Layout.serial(7), [[4]])
    assert rows.position[0].tolist() == list(range(4, 11))
    assert dense_mask(rows, 6)[0, 0].int().tolist() == [[1, 1, 1, 1, 0, 0] + [1] * 7] * 7


def test_token_ids_first_slot():
    layout = Layout(2, (1, 2), 3)
    ids = layout.token_ids(torch.tensor([[[5, 6]]]), 9, torch.tensor([[[7, 8]]]))
    assert ids.tolist() == [[[5, 6, 7, 9, 9, 8, 9, 9]]]
    with pytest.raises(ValueError, match="anchor count"):
        Layout(1, (2,), 3)


@pytest.mark.parametrize("starts", [[[1]], [[0, 3], [17, 130]], [[127, 128], [129, 64]]])
@pytest.mark.parametrize("layout", [Layout.tree(3), Layout.serial(7), Layout(2, (2,), 5), Layout.tree(2, 2)])
@pytest.mark.parametrize("in_flight", [False, True])
def test_dense_equals_flex(layout, starts, in_flight):
    rows = rows_of(layout, starts)
    if in_flight:
        taps = torch.arange(rows.ids.numel()).view_as(rows.ids) // layout.rows % 2  # every other tree
        rows = replace(rows, taps=taps)
    context_length, heads, kv_heads, width = 131, 4, 2, 16
    B, R = rows.ids.shape
    torch.manual_seed(0)
    query = torch.randn(B, heads, R, width)
    key, value = torch.randn(2, B, kv_heads, context_length + in_flight_columns(rows) + R, width)
    dense = attend(query, key, value, dense_mask(rows, context_length))
    flex = attend(query, key, value, flex_mask(rows, context_length))
    torch.testing.assert_close(dense, flex, atol=1e-5, rtol=1e-5)
    assert flex_attention is not None


def features_and_block(drafter, T=6, B=2):
    torch.manual_seed(3)
    return torch.randn(B, T, drafter.feature_width), torch.randint(0, 90, (B, drafter.draft_length + 1))


@torch.no_grad()
def test_branch_equals_single_window(drafter):
    features, block = features_and_block(drafter)
    B, T, d = *features.shape[:2], drafter.draft_length
    tree = drafter.tree_hidden(features, block)
    for r in range(d + 1):
        window = Layout(r + 1, (r + 1,), d)
        ids = window.token_ids(block[:, None, : r + 1], drafter.config.mask_token_id)
        rows = Rows.build(window, torch.full((B, 1), T), ids)
        alone = rows.branches(drafter(features, rows))[:, 0, 0]
        torch.testing.assert_close(tree[:, r], alone, atol=1e-5, rtol=0)


@torch.no_grad()
def test_perturbations_leave_a_branch_bit_identical(drafter):
    features, block = features_and_block(drafter, T=9)
    p, d, r = 6, drafter.draft_length, 1
    layout, start = Layout.tree(d), torch.full((2, 1), 6)

    def branch(features, block, ids_edit=None):
        ids = layout.token_ids(block[:, None], drafter.config.mask_token_id)
        if ids_edit is not None:
            ids_edit(ids)
        rows = Rows.build(layout, start, ids)
        return rows.branches(drafter(features, rows))[:, 0, r]

    reference = branch(features, block)
    later_features = features.clone()
    later_features[:, p:] += 100.0
    assert torch.equal(branch(later_features, block), reference)
    later_anchor = block.clone()
    later_anchor[:, r + 1 :] = (later_anchor[:, r + 1 :] + 5) % 90
    assert torch.equal(branch(features, later_anchor), reference)

    def other_branch(ids):
        ids[..., layout.spine + d * (r + 1) :] = 1
        ids[..., layout.spine : layout.spine + d * r] = 2

    assert torch.equal(branch(features, block, other_branch), reference)
    earlier = features.clone()
    earlier[:, p - 1] += 1.0
    assert not torch.equal(branch(earlier, block), reference)
    own_anchor = block.clone()
    own_anchor[:, r] = (own_anchor[:, r] + 5) % 90
    assert not torch.equal(branch(features, own_anchor), reference)
