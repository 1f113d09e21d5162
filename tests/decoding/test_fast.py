"""The fast target pass against the eager one; its kernels against their plain twins (on a GPU)."""

import pytest
import torch
from conftest import make_drafter, make_target
from safetensors.torch import load_file
from transformers import SmolLM3Config, SmolLM3ForCausalLM

from mdflash import Target, decode, load_drafter
from mdflash.decoding.deployment import Deployment
from mdflash.decoding.fast import FastDecoder, FastTargetRunner, ops, why_not_fast, why_not_fast_drafter
from mdflash.decoding.fast.head import greedy_draft
from mdflash.decoding.target_runner import SlotCache
from mdflash.decoding.types import Draft
from mdflash.drafter.heads import VanillaHead
from mdflash.drafter.sampling import Sampling

TAPS = (-1, 0, 2)
PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8], [9] * 12, [10], list(range(20, 60))]
WIDE = {"hidden": 64, "head_dim": 16}
YARN = {
    "rope_parameters": {
        "rope_type": "yarn",
        "factor": 4.0,
        "rope_theta": 10000.0,
        "original_max_position_embeddings": 128,
    }
}


def make(family="qwen3", **extra):
    return make_target(family, **WIDE | extra)


def eager(target, cache, ids, start):
    positions = start[:, None] + torch.arange(ids.shape[1], device=ids.device)
    mask = cache.at(positions, cache.pairs[0][0].shape[2])
    out = target.forward(ids, TAPS, positions, cache, mask)
    return out.hidden, out.features


@pytest.mark.parametrize(
    ("family", "extra"),
    [
        ("qwen3", {}),
        ("qwen3", {"attention_bias": True}),
        ("qwen3", YARN),
        ("llama", {}),
        ("llama", {"mlp_bias": True, "attention_bias": True, "tie_word_embeddings": True}),
    ],
)
def test_fast_pass_equals_the_eager_one(family, extra):
    """Ragged rows, several passes: states, features and caches; the eager path still works on the fused weights."""
    target = make(family, **extra)
    fast, length = FastDecoder(target), 40
    caches = [SlotCache(target, 3, length) for _ in "ab"]
    generator = torch.Generator().manual_seed(0)
    start = torch.tensor([0, 0, 0])
    for queries, step in ((9, (9, 4, 7)), (4, (2, 4, 1)), (1, (1, 1, 1)), (4, (0, 0, 0))):
        ids = torch.randint(97, (3, queries), generator=generator)
        expected = eager(target, caches[0], ids, start)
        seen = []
        found = fast.forward(ids, start, caches[1].pairs, TAPS, seen.append)
        assert seen == [0, 1, 2]
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
        start = start + torch.tensor(step)
    for ours, theirs in zip(caches[1].pairs, caches[0].pairs, strict=True):
        torch.testing.assert_close(ours, list(theirs), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("method", ["autoregressive", "dspark", "dpara"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_fast_runner_gives_the_eager_tokens(method, temperature):
    target = make()
    drafter = make_drafter(target)
    settings = dict(max_new_tokens=20, temperature=temperature, stop_ids=[], batch_size=2, seed=5)
    runs = [decode(target, drafter, PROMPTS, method, runner=runner, **settings) for runner in ("eager", "fast")]
    assert [(r.token_ids, r.rounds) for r in runs[0]] == [(r.token_ids, r.rounds) for r in runs[1]]


SETTINGS = [
    {"runner": "eager"},
    {"runner": "fast", "lm_head": "all"},
    {"runner": "fast", "lm_head": "selected"},
    {"runner": "fast", "head_device": "target"},
]
DRAFTING = [
    {"in_flight_taps": 2},
    {"bonus_guesses": 2},
    {"in_flight_taps": 3, "bonus_guesses": 1, "lm_head": "all"},
    {"in_flight_taps": 1, "bonus_guesses": 4, "head_device": "target"},
    {"in_flight_taps": 1, "bonus_guesses": 2, "guess_source": "draft"},
]


def same_everywhere(devices: str, method: str, temperature: float, head: str = "vanilla", **settings) -> None:
    """Ragged rows that refill give the CPU's eager tokens and rounds on these devices."""
    target = make()
    drafter = make_drafter(target, head=head)
    asked = dict(max_new_tokens=24, temperature=temperature, stop_ids=[5, 11], batch_size=3, seed=2)
    asked |= {
        name: settings.pop(name) for name in ("in_flight_taps", "bonus_guesses", "guess_source") if name in settings
    }
    expected = decode(target, drafter, PROMPTS * 2, method, **asked)
    found = decode(target, drafter, PROMPTS * 2, method, devices=devices, **asked, **settings)
    assert [(r.token_ids, r.rounds) for r in found] == [(r.token_ids, r.rounds) for r in expected]


@pytest.mark.gpu
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("method", ["autoregressive", "dspark", "dpara"])
def test_one_gpu_gives_the_cpu_tokens(method, temperature, settings):
    same_everywhere("cuda:0,cuda:0", method, temperature, **settings)


@pytest.mark.parametrize(
    "devices",
    [pytest.param("cuda:0,cuda:0", marks=pytest.mark.gpu), pytest.param("cuda:0,cuda:1", marks=pytest.mark.gpu2)],
)
@pytest.mark.parametrize("runner", ["eager", "fast"])
@pytest.mark.parametrize("settings", DRAFTING, ids=str)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_gpus_draft_beyond_the_paper_as_the_cpu(temperature, settings, runner, devices):
    same_everywhere(devices, "dpara", temperature, runner=runner, **settings)


@pytest.mark.gpu2
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_two_gpus_give_the_cpu_tokens(temperature, settings):
    same_everywhere("cuda:0,cuda:1", "dpara", temperature, **settings)


@pytest.mark.gpu
@pytest.mark.parametrize("head", ["gated", "rnn"])
def test_other_heads_on_a_gpu(head):
    same_everywhere("cuda:0,cuda:0", "dpara", 0.0, head, runner="fast")


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [True, False])
def test_graphs_and_lag_change_no_token(graphs, monkeypatch):
    build = Deployment.__init__
    for lag in (0, 1, 3):
        monkeypatch.setattr(
            Deployment, "__init__", lambda self, *args, lag=lag, **kw: build(self, *args, graphs=graphs, lag=lag, **kw)
        )
        same_everywhere("cuda:0,cuda:0", "dpara", 0.0, runner="fast")


@pytest.mark.gpu
@pytest.mark.parametrize("extra", [{}, YARN], ids=["plain", "yarn"])
def test_long_contexts(extra):
    """Past 4096 positions, where splits of the context are long; YaRN's stretched frequencies too."""
    target = make(**extra | {"max_position_embeddings": 8192})
    drafter = make_drafter(target, max_position_embeddings=8192)
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(97, (length,), generator=generator).tolist() for length in (5000, 4090, 17)]
    asked = dict(max_new_tokens=24, stop_ids=[], batch_size=3, devices="cuda:0,cuda:0")
    expected = [r.token_ids for r in decode(target, drafter, prompts, "autoregressive", **asked)]
    for method in ("autoregressive", "dspark", "dpara"):
        assert [r.token_ids for r in decode(target, drafter, prompts, method, **asked, runner="fast")] == expected


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [True, False])
def test_tap_events_open_features_before_the_pass_ends(graphs):
    """Another stream that waits for a tap's event reads its finished features, and may be done before the pass is."""
    target = make(layers=8, max_position_embeddings=8192)
    target.model.to("cuda")
    runner = FastTargetRunner(target, (-1, 1, 6), Sampling(), 1, 4000, graphs=graphs, tap_events=True)
    block, _ = runner.prefill([0], [list(range(90)) * 40], None)
    block = block.holding(Draft(torch.tensor([[1, 2, 3]], device="cuda")))
    other, width = torch.cuda.Stream(), target.config.hidden_size
    for _ in range(3):
        verdict = runner.verify(block, None)
        ended = torch.cuda.current_stream().record_event(torch.cuda.Event(enable_timing=True))
        with torch.cuda.stream(other):
            other.wait_event(runner.tapped[1])
            early = verdict.features[..., : 2 * width].clone()
            read = other.record_event(torch.cuda.Event(enable_timing=True))
        torch.cuda.synchronize()
        assert torch.equal(early, verdict.features[..., : 2 * width])
        verdict.features.zero_()
    assert not graphs or read.elapsed_time(ended) > 0


@pytest.mark.gpu
def test_five_hundred_requests_leave_memory_flat():
    target = make()
    drafter = make_drafter(target)
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 200, (500,), generator=generator).tolist()
    prompts = [torch.randint(97, (length,), generator=generator).tolist() for length in lengths]
    held = []
    results = decode(
        target, drafter, prompts, "dpara", 40, stop_ids=[5, 11], batch_size=16, devices="cuda:0,cuda:0", runner="fast",
        on_round=lambda index, request: request.finish_reason and held.append(torch.cuda.memory_allocated()),
    )  # fmt: skip
    assert len(results) == len(held) == 500
    assert max(held[250:]) <= max(held[50:250])
    alone = decode(target, drafter, prompts[:20], "dpara", 40, stop_ids=[5, 11])
    assert [r.token_ids for r in results[:20]] == [r.token_ids for r in alone]


@pytest.mark.gpu
@pytest.mark.parametrize(("batch", "rank", "vocabulary"), [(1, 256, 5000), (3, 8, 97), (20, 64, 130)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_greedy_steps_equal_their_definition(batch, rank, vocabulary, dtype):
    torch.manual_seed(batch)
    head = VanillaHead(vocabulary, rank, 4).to("cuda", dtype)
    logits = torch.randn(batch, 7, vocabulary, device="cuda", dtype=dtype)
    first = torch.randint(vocabulary, (batch, 3), device="cuda")[:, 1]  # a column, as a verdict's bonus is
    expected, *_ = head.draft(logits, first, None, None, Sampling())
    found = greedy_draft(logits, first, head)
    if dtype == torch.float32:
        assert torch.equal(found, expected)
    else:  # a product rounded the other way may decide between near-equal scores
        previous = torch.cat([first[:, None], found[:, :-1]], dim=1)
        scores = logits.float() + head.biases(previous, None).float()
        taken = scores.gather(2, found[..., None]).squeeze(2)
        assert (scores.amax(-1) - taken).max() <= 0.02


def test_fusing_holds_nothing_twice():
    target = make()
    fast, layer = FastDecoder(target), target.decoder.layers[1]
    weight = fast.stack.layers[1].qkv[0]
    assert layer.self_attn.q_proj.weight.data_ptr() == weight.data_ptr()
    assert layer.self_attn.v_proj.weight.untyped_storage().data_ptr() == weight.untyped_storage().data_ptr()


def test_only_known_unaltered_layers_are_fast():
    """Other architectures, adapters and hooks compute something else: the eager path serves them."""
    config = SmolLM3Config(
        vocab_size=97, hidden_size=64, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, pad_token_id=0,
    )  # fmt: skip
    assert "SmolLM3DecoderLayer" in why_not_fast(Target(SmolLM3ForCausalLM(config)))
    target, drafter = make(), make_drafter(make())

    class Scaled(torch.nn.Linear):
        pass

    target.decoder.layers[2].mlp.up_proj.__class__ = Scaled
    drafter.layers[1].self_attn.v_proj.__class__ = Scaled
    assert "its up_proj is a Scaled" in why_not_fast(target)
    assert "of the drafter, its v_proj is a Scaled" in why_not_fast_drafter(drafter)
    with pytest.raises(ValueError, match="use 'eager' or 'auto'"):
        decode(target, None, PROMPTS, "autoregressive", 4, runner="fast")
    hooked = make()
    hooked.decoder.layers[3].register_forward_hook(lambda *_: None)
    assert why_not_fast(hooked) == "its layers have forward hooks"


def test_replaced_weights_are_seen_by_the_next_fast_decoding():
    target = make()
    decode(target, None, PROMPTS, "autoregressive", 4, runner="fast")
    for part in (target.decoder.layers[2].mlp.up_proj, target.decoder.norm):
        part.weight = torch.nn.Parameter(3 * torch.rand_like(part.weight), requires_grad=False)
        runs = [decode(target, None, PROMPTS, "autoregressive", 12, runner=runner) for runner in ("eager", "fast")]
        assert [r.token_ids for r in runs[0]] == [r.token_ids for r in runs[1]]
    before = target.decoder.layers[0].self_attn.q_proj.weight.data_ptr()
    FastDecoder(target)  # already side by side: nothing moves
    assert target.decoder.layers[0].self_attn.q_proj.weight.data_ptr() == before


def test_models_save_as_before_after_a_fast_decoding(tmp_path):
    target = make()
    drafter = make_drafter(target)
    kept = {name: tensor.clone() for name, tensor in drafter.state_dict().items()}
    decode(target, drafter, PROMPTS, "dpara", 4, stop_ids=[], runner="fast")
    drafter.save_pretrained(tmp_path / "drafter")
    target.model.save_pretrained(tmp_path / "target")
    again = load_drafter(tmp_path / "drafter").state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in kept.items())
    assert torch.equal(load_file(tmp_path / "target/model.safetensors")["lm_head.weight"], target.lm_head.weight)


def test_unfit_targets_are_named():
    target = make()
    target.config.hidden_act = "gelu"
    assert "SiLU" in why_not_fast(target)
    with pytest.raises(ValueError, match="SiLU-gated one; use the eager one"):
        FastDecoder(target)
    assert why_not_fast(make_target(head_dim=24)) == "its head width 24 is no power of two from 16 on"


def inputs(B, K, G, Q, E, S, D, device, dtype=torch.float32):
    generator = torch.Generator().manual_seed(B * S)
    make = lambda *shape: torch.randn(*shape, generator=generator).to(device, dtype)  # noqa: E731
    start = torch.randint(0, S - E + 1, (B,), generator=generator)
    start[0], start[-1] = 0, S - E
    return {
        "qkv": make(B, Q, (G * K + 2 * K) * D), "cos": make(B, Q, D), "sin": make(B, Q, D), "start": start.to(device),
        "key": make(B, K, S, D), "value": make(B, K, S, D), "norms": (make(D), make(D)), "x": make(B, Q, 3 * D),
        "residual": make(B, Q, 3 * D), "weight": make(3 * D), "gate_up": make(B, Q, 2 * 3 * D),
        "mask": ((torch.rand(Q, E, generator=generator) < 0.5) | torch.eye(Q, E).bool()).to(device, torch.int8),
    }  # fmt: skip


def results(module, data, Q, norms):
    key, value = data["key"].clone(), data["value"].clone()
    norms = data["norms"] if norms else None
    query = module.rotate_and_store(data["qkv"], data["cos"], data["sin"], data["start"], key, value, norms, 1e-6)
    attended = module.cache_attention(query, key, value, data["start"], data["mask"], data["cos"].shape[-1] ** -0.5)
    plain = module.add_norm(data["x"], None, data["weight"], 1e-6)
    added = module.add_norm(data["x"], data["residual"], data["weight"], 1e-6)
    return [query, key, value, attended, *plain, *added, module.silu_gate(data["gate_up"])]


@pytest.mark.gpu
@pytest.mark.parametrize("norms", [True, False])
@pytest.mark.parametrize(
    "shape",
    [
        (1, 8, 4, 8, 8, 1024, 128),
        (3, 2, 2, 1, 1, 97, 64),
        (2, 1, 5, 16, 16, 300, 32),
        (1, 1, 1, 1, 1, 1, 16),
        (2, 2, 4, 64, 64, 200, 64),
        (1, 2, 5, 64, 64, 64, 16),
        (2, 2, 4, 64, 72, 200, 64),
        (3, 1, 2, 288, 296, 500, 128),
    ],
)
def test_kernels_equal_their_twins(shape, norms):
    from mdflash.decoding.fast import kernels

    data = inputs(*shape, "cuda")
    for ours, theirs in zip(results(kernels, data, shape[3], norms), results(ops, data, shape[3], norms), strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=2e-5)
