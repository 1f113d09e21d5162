"""The plan: parameters against real models, activations against what autograd saves, memory by ZeRO stage, the command."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import FIXTURES, make_drafter, make_target
from transformers import AutoConfig, GPT2Config, Qwen3MoeConfig

from mdflash import cli
from mdflash.drafter import Layout, Rows
from mdflash.recipe import DrafterSection, Recipe, StageSection, TargetSection, read_recipe
from mdflash.training.flops import layer_weights
from mdflash.training.plan import Parameters, activations, count_parameters, make_plan, optimizer_memory

ROOT = Path(__file__).parent.parent.parent
OPTIONS = dict(gpus=1, tflops=100.0)


def recipe_for(**settings) -> Recipe:
    section = dict(deepspeed=None, max_length=64, global_batch_size=8, starts_per_text=4, epochs=2.0) | settings
    return Recipe(
        name="plan",
        target=TargetSection(path="nowhere"),
        drafter=DrafterSection(target_layer_ids=[0, 2], mask_token_id=96, block_size=3, markov_rank=8),
        mdflash=StageSection(**section),
    )


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("frozen_heads", [(), ("markov_head", "confidence_head"), ("confidence_head",)])
def test_parameters_are_the_models(tied, frozen_heads):
    target = make_target(tie_word_embeddings=tied)
    drafter = make_drafter(target).freeze(frozen_heads)
    found = count_parameters(target.config, drafter.config, frozen_heads)
    lent = drafter.embed_tokens.weight.numel() + drafter.lm_head.weight.numel()
    assert found.target == sum(p.numel() for p in target.model.parameters())
    assert found.drafter == sum(p.numel() for p in drafter.parameters())
    assert found.engine == found.drafter - lent
    assert found.trained == sum(p.numel() for p in drafter.parameters() if p.requires_grad)


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize(("hidden", "inter", "starts", "length"), [(64, 256, 8, 50), (128, 128, 2, 300)])
def test_activations_are_what_autograd_saves(bf16, hidden, inter, starts, length):
    target = make_target(hidden=hidden)
    drafter = make_drafter(target, intermediate_size=inter, num_hidden_layers=4).freeze().train()
    layout = Layout.tree(3)
    ids = torch.zeros(1, starts, layout.spine, dtype=torch.long)
    rows = Rows.build(layout, torch.arange(starts)[None], layout.token_ids(ids, 96))
    parameters = {p.data_ptr() for p in drafter.parameters()} | {0}
    matrices = [p for p in drafter.parameters() if p.dim() == 2]
    weights = {tuple(x.shape) for p in matrices for x in (p, p.T)}
    mask = (1, 1, starts * layout.rows, length + starts * layout.rows)

    def bytes_saved(again: bool) -> int:
        saved = {}

        def keep(x):
            cast = bf16 and tuple(x.shape) in weights  # autocast copies are planned apart
            if x.data_ptr() not in parameters and tuple(x.shape) != mask and not cast:
                saved[x.untyped_storage().data_ptr()] = x.untyped_storage()
            return x

        def keep_inputs(layer, inputs):  # a checkpoint holds them beside autograd
            for x in (inputs[0], inputs[3].key, inputs[3].value):
                keep(x)

        drafter.activation_checkpointing = again
        for layer in drafter.layers if again else ():
            layer.register_forward_pre_hook(keep_inputs)
        with (
            torch.autocast("cpu", torch.bfloat16, enabled=bf16),
            torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x),
        ):
            drafter(features, rows).sum()
        return sum(storage.nbytes() for storage in saved.values())

    features = torch.randn(1, length, drafter.feature_width)
    settings = StageSection(micro_batch_size=1, max_length=length, starts_per_text=starts, bf16=bf16)
    whole, checkpointed = activations(drafter.config, (layout,), settings)
    assert whole == pytest.approx(bytes_saved(again=False), rel=0.1)
    layers, inputs = len(drafter.layers), len(drafter.layers) * starts * layout.rows * hidden * 4
    a_layer = (whole - checkpointed + inputs) / (layers - 1)  # the one that backward computes again
    assert checkpointed - a_layer == pytest.approx(bytes_saved(again=True), rel=0.1)


MILLION = Parameters(target=0, target_layers=0, drafter=0, engine=1_100_000, trained=1_000_000)


@pytest.mark.parametrize(("zero", "gpus", "gpu_mb", "host_mb"), [
    (None, 1, 4.4 + 4 + 8, 0),                                # parameters, gradients, Adam
    (None, 4, 4.4 + 4 + 8 + 4, 0),                            # and DDP's buckets
    ({"stage": 0}, 1, 4.4 + 4 + 8, 0),
    ({"stage": 1}, 4, 4.4 + 1 + 4 + 0.4 + 2, 0),              # partition, all gradients, bucket, a quarter of Adam
    ({"stage": 2}, 4, 4.4 + 1 + 2 + 0.4 + 2, 0),              # this micro-batch's partition beside the accumulated
    ({"stage": 2, "overlap_comm": True}, 8, 4.4 + 0.5 + 0.5 + 0.8 + 1, 0),  # no accumulation; two buckets
    ({"stage": 3}, 4, 1.1 + 2 + 1 + 0.4 + 2, 0),              # at most stage3_max_live_parameters are gathered
    ({"stage": 1, "offload_optimizer": {"device": "cpu"}}, 4, 4.4 + 4 + 0.4, 2 + 3),
    ({"stage": 2, "offload_optimizer": {"device": "cpu"}}, 4, 4.4 + 0.4, 2 + 4),
    ({"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}, 4, 2 + 0.4, 2 + 2 + 1.1),
])  # fmt: skip
def test_optimizer_memory_by_stage(tmp_path, zero, gpus, gpu_mb, host_mb):
    file = None
    if zero:
        file = tmp_path / "zero.json"
        file.write_text(
            json.dumps({"zero_optimization": {"reduce_bucket_size": 1e5, "stage3_max_live_parameters": 5e5} | zero})
        )
    parts, host = optimizer_memory(MILLION, StageSection(deepspeed=file and str(file), global_batch_size=8), gpus)
    assert sum(parts.values()) / 1e6 == pytest.approx(gpu_mb)
    assert host / 1e6 == pytest.approx(host_mb)


@pytest.mark.parametrize(("size", "trained", "drafter", "target", "most"), [
    ("8b", 1.05, 2.37, 8.19, 60), ("14b", 1.78, 3.42, 14.77, 139),
])  # fmt: skip
def test_qwen3(size, trained, drafter, target, most, monkeypatch):
    monkeypatch.chdir(ROOT)
    recipe, _ = read_recipe(["--config", f"recipes/qwen3_{size}.yaml"])
    plan = make_plan(recipe, AutoConfig.from_pretrained(FIXTURES / f"qwen3_{size}.json"), **OPTIONS)
    assert plan.parameters.trained / 1e9 == pytest.approx(trained, abs=0.005)
    assert plan.parameters.drafter / 1e9 == pytest.approx(drafter, abs=0.005)
    assert plan.parameters.target / 1e9 == pytest.approx(target, abs=0.005)
    assert plan.memory["target weights"] == 2 * plan.parameters.target
    assert plan.checkpointed_peak < plan.peak < most * 1e9
    assert plan.texts == 65536 - 256  # whole batches of 128


def test_memory_options(monkeypatch):
    """A sharded target, checkpointed layers and every stage's offloading file, against the plan without."""
    monkeypatch.chdir(ROOT)
    target = AutoConfig.from_pretrained(FIXTURES / "qwen3_8b.json")

    def planned(gpus=8, **overrides):
        arguments = [part for name, value in overrides.items() for part in (f"--{name.replace('__', '.')}", str(value))]
        recipe, _ = read_recipe(["--config", "recipes/qwen3_8b.yaml", *arguments])
        return make_plan(recipe, target, gpus=gpus, tflops=100.0)

    plain, sharded = planned(), planned(target__shard=True)
    layer = 2 * layer_weights(target)  # bytes, without its norms
    assert sharded.memory["target weights"] == pytest.approx(2 * 1.245e9 + 36 * layer / 8, rel=1e-3)
    assert sharded.memory["target: layers gathered"] == pytest.approx(3 * layer, rel=1e-3)
    assert planned(gpus=1, target__shard=True).memory == planned(gpus=1).memory
    again = planned(mdflash__activation_checkpointing=True)
    assert again.peak == again.checkpointed_peak == plain.checkpointed_peak < plain.peak
    for stage in (1, 2, 3):
        file = f"recipes/deepspeed/zero{stage}"
        there, here = (planned(mdflash__deepspeed=f"{file}{kind}.json") for kind in ("_offload", ""))
        assert there.peak < here.peak
        assert there.host > here.host == 0


def test_time_follows_from_the_rate():
    target = make_target().config
    one = make_plan(recipe_for(), target, texts=100, **OPTIONS)
    assert one.samples_per_s == pytest.approx(0.45 * 100e12 / sum(one.flops.values()))
    assert one.texts == 2 * 13 * 8  # two epochs, the last batch filled up
    assert one.hours == pytest.approx(one.texts / one.samples_per_s / 3600)
    two = make_plan(recipe_for(), target, gpus=2, tflops=100, share=0.9, texts=100)
    assert two.samples_per_s == pytest.approx(4 * one.samples_per_s)
    assert make_plan(recipe_for(max_steps=5), target, **OPTIONS).texts == 40
    assert make_plan(recipe_for(), target, **OPTIONS).hours is None
    shorter = make_plan(recipe_for(), target, length=10, **OPTIONS)
    assert shorter.samples_per_s > one.samples_per_s
    assert shorter.peak == one.peak


def test_dspark_trains_the_heads_in_serial_windows():
    target = make_target().config
    recipe = recipe_for()
    finetune, bootstrap = (
        make_plan(replace(recipe, stage=stage, dspark=recipe.mdflash), target, **OPTIONS)
        for stage in ("mdflash", "dspark")
    )
    assert bootstrap.parameters.trained == bootstrap.parameters.engine > finetune.parameters.trained
    assert bootstrap.flops["rows_forward"] * 16 == finetune.flops["rows_forward"] * 3  # 3 rows of a tree's 16
    assert bootstrap.flops["heads_backward"] > 0


def test_what_goes_beyond_the_paper_is_planned():
    """Independent windows carry more rows; serial windows, columns in flight and the anchors' labels come on top."""
    target = make_target().config
    paper, independent, early = (
        make_plan(recipe_for(**more), target, **OPTIONS)
        for more in (
            {},
            {"windows": "independent"},
            {"in_flight_taps": [0, 1], "serial_windows": True, "spine_loss": 0.5, "known_bonus": 0.5},
        )
    )
    rows, d = paper.flops["rows_forward"], 3
    assert independent.flops["rows_forward"] * (4 + 4 * d) == rows * (1 + 2 + 3 + 4 + 4 * d)
    assert early.flops["rows_forward"] * (4 + 4 * d) == rows * (4 + 4 * d + d)
    assert early.flops["in_flight_forward"] > paper.flops["in_flight_forward"] == 0
    assert early.memory["activations"] > paper.memory["activations"]


@pytest.mark.parametrize(("change", "message"), [
    (dict(gpus=0), "gpus=0"),
    (dict(gpus=3), "multiple of micro_batch_size"),
    (dict(tflops=0.0), r"tflops=0\.0"),
    (dict(share=1.5), r"matmul_share=1\.5"),
    (dict(length=65), r"use 1\.\.max_length = 64"),
    (dict(texts=0), "texts=0"),
])  # fmt: skip
def test_values_out_of_range(change, message):
    with pytest.raises(ValueError, match=message):
        make_plan(recipe_for(), make_target().config, **OPTIONS | change)


@pytest.mark.parametrize(("config", "message"), [
    (GPT2Config(vocab_size=97), "it lacks intermediate_size"),
    (Qwen3MoeConfig(vocab_size=97, hidden_size=32, num_hidden_layers=4, num_experts=4), "matrix weights"),
])  # fmt: skip
def test_targets_that_the_count_does_not_describe(config, message):
    with pytest.raises(ValueError, match=message):
        make_plan(recipe_for(), config, **OPTIONS)


# the command


@pytest.fixture
def command(tmp_path, monkeypatch) -> list[str]:
    """A recipe whose target and base drafter are folders with a config alone: no weights, no network."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    target = make_target()
    target.config.save_pretrained("target")
    make_drafter(target).config.save_pretrained("base")
    settings = {
        "name": "tiny", "target": {"path": "target"}, "drafter": {"base": "base"}, "data": {"prompts": "x", "limit": 2000},
        "mdflash": {"deepspeed": None, "max_length": 64},
    }  # fmt: skip
    Path("tiny.yaml").write_text(json.dumps(settings))
    return ["plan", "--config", "tiny.yaml"]


def test_plan_prints_every_part(command, capsys):
    assert cli.main([*command, "--tflops", "0.001", "--gpus", "2", "--mdflash.starts_per_text", "8"]) == 0
    out = capsys.readouterr().out
    for text in (
        "target layers", "student logits backward", "drafter's own part", "target weights", "Adam state",
        "activations checkpointed", "2 GPU x 0.001 TFLOP/s x 0.45", "samples/s", "tokens/s", "texts in", "hours",
    ):  # fmt: skip
        assert text in out
    assert (
        cli.main([*command, "--tflops", "1", "--target_config", "target/config.json", "--target.path", "no/where"]) == 0
    )


@pytest.mark.parametrize(("options", "message"), [
    ([], "give one GPU's bf16 rate with --tflops"),
    (["--tflops", "1", "--target.path", "not/a/hub-id"], "pass its config.json with --target_config"),
    (["--tflops", "1", "--target_config", "nowhere.json"], "nowhere.json: no such file"),
    (["--tflops", "1", "--target_config", "tiny.yaml"], "gives no config of the target"),
    (["--tflops", "1", "--mdflash.deepspeed", "nowhere.json"], "no such file"),
    (["--tflops", "1", "--target_config", "other"], "the drafter's hidden_size=32: the target has 64"),
])  # fmt: skip
def test_plan_errors(command, capsys, options, message):
    make_target(hidden=64).config.save_pretrained("other")
    assert cli.main([*command, *options]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert message in err
    assert cli.main(["plan"]) == 2


@pytest.mark.gpu
def test_measured_rate():
    from mdflash.training.plan import measured_tflops

    assert 1 < measured_tflops(2048, 10) < 1e5
