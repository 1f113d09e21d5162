"""The window loss: its plain definition, chunking, gradients, and what stays frozen."""

import copy

import pytest
import torch
from conftest import lend, make_drafter, make_target

from mdflash import compilation
from mdflash.chat import Sample
from mdflash.drafter import Layout, Rows
from mdflash.drafter.model import HEADS_OF_DSPARK
from mdflash.drafter.tree import dense_mask
from mdflash.recipe import LoraSection
from mdflash.training import STAGE_WEIGHTS, DrafterForTraining, WindowDataset
from mdflash.training.fused import FusedWindowLoss, slot_terms, terms_for
from mdflash.training.lora import add_adapters
from mdflash.training.loss import Windows, loss_sum, sharded_loss_sum, slot_losses


def batch_for(layouts, seed=0, starts=5, length=40):
    generator = torch.Generator().manual_seed(seed)
    samples = [
        Sample(
            f"s{i}",
            tuple(torch.randint(0, 90, (length - 3 * i,), generator=generator).tolist()),
            ((6, length - 3 * i),),
        )
        for i in range(3)
    ]
    dataset = WindowDataset(samples, layouts, starts, seed)
    return dataset, dataset.collate([dataset[(0, i)] for i in range(3)])


def module_for(target, drafter, stage, loss_rows=10_000):
    layouts = (Layout.tree(3) if stage == "mdflash" else Layout.serial(3),)
    drafter = lend(drafter, target).freeze(HEADS_OF_DSPARK if stage == "mdflash" else ())
    return DrafterForTraining(drafter, target, layouts, STAGE_WEIGHTS[stage], loss_rows, bf16=False)


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
def test_loss_equals_its_formula_in_float64(target, head):
    drafter = lend(make_drafter(target, head=head), target).double()
    target64 = copy.deepcopy(target.lm_head).double()
    torch.manual_seed(0)
    windows = Windows(
        hidden=torch.randn(5, 3, 32).double(), teacher=torch.randn(5, 3, 32).double(), previous=torch.randint(0, 97, (5, 3)),
        labels=torch.randint(0, 97, (5, 3)), weight=torch.rand(5, 3).double(),
    )  # fmt: skip
    losses = slot_losses(drafter, target64, windows, STAGE_WEIGHTS["dspark"])
    state = drafter.head.start(torch.Size([5]), windows.previous)
    for i in range(3):
        code, state = drafter.head.step(windows.previous[:, i], windows.hidden[:, i], state)
        q = (drafter.lm_head(windows.hidden[:, i]) + drafter.head.bias(code)).softmax(-1)
        p = target64(windows.teacher[:, i]).softmax(-1)
        l1 = (q - p).abs().sum(-1)
        cross_entropy = -q.gather(1, windows.labels[:, i : i + 1]).squeeze(1).log()
        c = drafter.confidence_logits(windows.hidden[:, i : i + 1], windows.previous[:, i : i + 1]).squeeze(1).sigmoid()
        a = 1 - l1 / 2
        confidence = -(a * c.log() + (1 - a) * (1 - c).log())
        torch.testing.assert_close(
            losses[:, i].double(), 0.1 * cross_entropy + 0.9 * l1 + confidence, atol=1e-4, rtol=1e-4
        )


def test_chunks_change_neither_loss_nor_gradients(target, drafter):
    figures = []
    for rows in (3, 10_000):
        module = module_for(target, drafter, "mdflash", rows)
        loss = module(**batch_for(module.layouts)[1])
        loss.backward()
        figures.append((loss.item(), torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])))
    assert figures[0][0] == pytest.approx(figures[1][0], rel=1e-6)
    torch.testing.assert_close(figures[0][1], figures[1][1], atol=1e-5, rtol=1e-4)


def test_no_window_still_gives_a_gradient_of_zero(target, drafter):
    module = module_for(target, drafter, "mdflash")
    dataset = WindowDataset([], module.layouts, 2, 0)
    loss = module(**dataset.collate([dataset[(0, -1)]]))
    loss.backward()
    assert loss.item() == 0
    assert all(p.grad is not None and p.grad.abs().sum() == 0 for p in module.drafter.layers.parameters())


@pytest.mark.parametrize("stage", ["mdflash", "dspark", "dflash"])
def test_what_trains_in_each_stage(target, stage):
    module = module_for(target, make_drafter(target, rank=0 if stage == "dflash" else 8), stage)
    module(**batch_for(module.layouts)[1]).backward()
    trained = {
        name.split(".")[1] for name, p in module.named_parameters() if p.requires_grad and p.grad.abs().sum() > 0
    }
    backbone = {"fc", "hidden_norm", "layers", "norm"}
    heads = {"markov_head", "confidence_head"} if stage == "dspark" else set()
    assert trained == backbone | heads
    assert not any("embed_tokens" in name or "lm_head" in name for name, _ in module.named_parameters())


def test_another_targets_drafter_is_refused(target, drafter):
    with pytest.raises(ValueError, match="embed_tokens differs"):
        DrafterForTraining(drafter, target, (Layout.tree(3),), STAGE_WEIGHTS["mdflash"], 100, bf16=False)


def test_teacher_reads_the_normed_state(target, drafter):
    """The loss is least when the drafter's distribution is the target's own: swap a drafter head for the teacher."""
    module = module_for(target, drafter, "mdflash")
    _dataset, batch = batch_for(module.layouts)
    captured = []
    original = module._windows

    def spy(*args):
        captured.append(original(*args))
        return captured[-1]

    module._windows = spy
    module(**batch)
    windows = captured[0]
    logits = target.model(input_ids=batch["ids"][:1]).logits
    start = batch["start"][0, 0].item()
    torch.testing.assert_close(target.logits(windows.teacher[0, 0]), logits[0, start + 1], atol=1e-5, rtol=1e-5)
    assert windows.previous[0].tolist() == batch["ids"][0, start + 1 : start + 4].tolist()
    assert windows.labels[0].tolist() == batch["ids"][0, start + 2 : start + 5].tolist()
    assert loss_sum(drafter, target.lm_head, windows, STAGE_WEIGHTS["mdflash"], 10).item() > 0


def windows_of(rows=5, d=3, hidden=32, vocabulary=97):
    torch.manual_seed(rows)
    return Windows(
        hidden=torch.randn(rows, d, hidden).double().requires_grad_(), teacher=torch.randn(rows, d, hidden).double(),
        previous=torch.randint(0, vocabulary, (rows, d)), labels=torch.randint(0, vocabulary, (rows, d)),
        weight=torch.rand(rows, d).double(),
    )  # fmt: skip


@pytest.mark.parametrize("stage", ["mdflash", "dspark"])
@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
@pytest.mark.parametrize("compute", [loss_sum, sharded_loss_sum])
def test_fused_loss_and_gradients_equal_the_definition(target, stage, head, compute):
    drafter = (
        lend(make_drafter(target, head=head), target).double().freeze(HEADS_OF_DSPARK if stage == "mdflash" else ())
    )
    lm_head, windows, weights = copy.deepcopy(target.lm_head).double(), windows_of(), STAGE_WEIGHTS[stage]
    trained = [windows.hidden, *(p for p in drafter.head.parameters() if p.requires_grad)]
    plain = (windows.weight * slot_losses(drafter, lm_head, windows, weights)).sum()
    ours = compute(drafter, lm_head, windows, weights, 4)
    torch.testing.assert_close(ours.double(), plain.double(), atol=1e-5, rtol=1e-5)
    expected, found = (torch.autograd.grad(3 * loss, trained) for loss in (plain, ours))
    for theirs, mine in zip(expected, found, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-4)


def test_no_vocabulary_tensor_outlives_its_chunk(target):
    """What the graph keeps for backward holds no [.., V] tensor, whatever the number of slots."""
    drafter, kept = lend(make_drafter(target), target).double().freeze(), []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor.shape) or tensor, lambda t: t):
        loss_sum(drafter, copy.deepcopy(target.lm_head).double(), windows_of(8), STAGE_WEIGHTS["mdflash"], 4)
    assert kept
    assert all(97 not in shape for shape in kept)


def test_one_graph_serves_all_lengths(target, drafter, monkeypatch):
    """Compiled layers give the plain ones' loss at every length, first one as long as the hidden size is wide, and are
    traced again at most once each."""
    monkeypatch.setattr(compilation, "BACKEND", "eager")  # traces and guards alone; no code is generated
    module = module_for(target, drafter, "mdflash").train()
    lengths = (32, 41, 48, 64, 57)
    batches = [batch_for(module.layouts, length=length)[1] for length in lengths]
    plain = [module(**batch).item() for batch in batches]
    torch._dynamo.reset()
    graphs = torch._dynamo.utils.counters["stats"]
    module._target[0].compile_layers()
    module.drafter.compile_layers()
    before, counts = graphs["unique_graphs"], []
    for batch, expected in zip(batches, plain, strict=True):
        assert module(**batch).item() == pytest.approx(expected, rel=1e-5)
        counts.append(graphs["unique_graphs"] - before)
    assert 3 <= counts[0] <= counts[-1] <= counts[0] + 1


@pytest.mark.parametrize("kind", ["plain", "bf16", "lora", "compiled"])
def test_checkpointed_layers_change_no_bit(target, drafter, monkeypatch, kind):
    """Loss and every gradient; every layer's forward runs twice."""
    monkeypatch.setattr(compilation, "BACKEND", "eager")
    figures, calls = [], []
    for again in (False, True):
        module = module_for(target, drafter, "mdflash").train()
        module.bf16, module.drafter.activation_checkpointing = kind == "bf16", again
        if kind == "lora":
            add_adapters(module.drafter, LoraSection(r=2), seed=0)
        if kind == "compiled":
            torch._dynamo.reset()
            module.drafter.compile_layers()
        for layer in module.drafter.layers:
            layer.register_forward_pre_hook(lambda *_: calls.append(1))
        loss = module(**batch_for(module.layouts)[1])
        loss.backward()
        figures.append([loss, *(p.grad for p in module.parameters() if p.requires_grad)])
    assert len(calls) == 3 * len(drafter.layers)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*figures, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("vocabulary", [97, 4096, 49152, 151936])
@pytest.mark.parametrize("teacher", [True, False])
def test_the_kernel_equals_its_twin(vocabulary, teacher):
    """Both terms and the gradient, fp32; then the whole function in bf16 against fp64."""
    torch.manual_seed(0)
    logits, other = 3 * torch.randn(2, 5, vocabulary, device="cuda")
    labels, weight = torch.randint(0, vocabulary, (5,), device="cuda"), torch.rand(5, device="cuda")
    other = other if teacher else None
    found = []
    for measure in (slot_terms, terms_for(logits.device)):
        written = logits.clone()
        found.append((*measure(written, other, labels, weight, (0.1, 0.9), True), written))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


@pytest.mark.gpu
def test_bf16_loss_is_near_float64():
    torch.manual_seed(0)
    hidden, teacher, code = (torch.randn(70, c, device="cuda").double() for c in (64, 64, 16))
    W, W2 = (torch.randn(5000, c, device="cuda").double() / c**0.5 for c in (64, 16))
    labels, weight = torch.randint(0, 5000, (70,), device="cuda"), torch.rand(70, device="cuda").double()
    figures = []
    for dtype in (torch.float64, torch.bfloat16):
        inputs = [x.to(torch.bfloat16).to(dtype).requires_grad_() for x in (hidden, code, W2)]
        W_, teacher_ = W.to(torch.bfloat16).to(dtype), teacher.to(torch.bfloat16).to(dtype)
        if dtype == torch.float64:
            log_q = (inputs[0] @ W_.T + inputs[1] @ inputs[2].T).log_softmax(-1)
            distance = (log_q.exp() - (teacher_ @ W_.T).softmax(-1)).abs().sum(-1)
            loss = (weight * (0.9 * distance - 0.1 * log_q.gather(1, labels[:, None])[:, 0])).sum()
        else:
            loss, _ = FusedWindowLoss.apply(
                inputs[0], inputs[1], W_, inputs[2], teacher_, labels, weight.float(), (0.1, 0.9), 32
            )
        figures.append([loss, *torch.autograd.grad(loss, inputs)])
    for theirs, ours in zip(*figures, strict=True):
        assert (ours.double() - theirs).norm() <= 0.02 * theirs.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("in_flight", [False, True])
@pytest.mark.parametrize("layout", [Layout.tree(3), Layout.serial(3)], ids=["tree", "serial"])
def test_flex_equals_dense_on_a_gpu(layout, in_flight):
    """Hidden states and gradients of features and weights at awkward context lengths; the first tree starts at 0, so that
    its rows see no context at all, the compiled layers included."""
    target = make_target(hidden=64)
    drafter = make_drafter(target).cast(device="cuda").train()
    for compiled in (False, True):
        if compiled:
            drafter.compile_layers()
        for length in (1, 127, 129, 257, 4095):
            generator = torch.Generator().manual_seed(length)
            start = torch.tensor([[0, length // 3, length - 1, length]]).cuda()
            anchors = torch.randint(97, (1, 4, layout.spine), generator=generator).cuda()
            first = torch.randint(97, (1, 4, 1), generator=generator).cuda() if not layout.spine else None
            taps = torch.tensor([[0, 1, 2, 3]]).cuda() if in_flight else None
            rows = Rows.build(layout, start, layout.token_ids(anchors, 3, first), taps_BN=taps)
            features = torch.randn(1, length, drafter.feature_width, generator=generator).cuda().requires_grad_()
            found = []
            for drafter.attention in ("dense", "flex"):
                hidden = drafter(features, rows)
                weights = [features, *(p for p in drafter.layers.parameters())]
                mix = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(0)).cuda()
                found.append((hidden, *torch.autograd.grad((hidden * mix).sum(), weights)))
            for dense, flex in zip(*found, strict=True):
                torch.testing.assert_close(flex, dense, atol=2e-3 * dense.abs().max().item() + 1e-6, rtol=0)


def test_every_row_sees_something():
    """No query is fully masked, which dense and fused attention would answer differently: each row sees itself."""
    for layout in (Layout.tree(7), Layout.serial(7)):
        start = torch.tensor([[0, 5]])
        rows = Rows.build(layout, start, torch.zeros(1, 2, layout.rows, dtype=torch.long))
        mask = dense_mask(rows, 5)[0, 0]
        assert mask[:, 5:].diagonal().all()


@pytest.mark.gpu
def test_flex_training_equals_dense_on_a_gpu():
    """Loss and gradients at awkward context lengths, with checkpointed layers too."""
    target = make_target(hidden=64)
    drafter = make_drafter(target)
    target.model.to("cuda")
    for length in (127, 129, 257):
        figures = []
        for attention, again in (("dense", False), ("flex", False), ("flex", True)):
            module = module_for(target, drafter, "mdflash").to("cuda")
            module.drafter.attention, module.drafter.activation_checkpointing = attention, again
            batch = {name: value.to("cuda") for name, value in batch_for(module.layouts, length=length)[1].items()}
            loss = module(**batch)
            loss.backward()
            figures.append(
                (loss.item(), torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None]))
            )
        for loss, gradient in figures[1:]:
            assert loss == pytest.approx(figures[0][0], rel=1e-4)
            torch.testing.assert_close(gradient, figures[0][1], atol=2e-3, rtol=2e-3)
