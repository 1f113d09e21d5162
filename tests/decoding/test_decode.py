"""`decode`: exact tokens, ragged batches, stops, budgets, overlap and errors."""

import time

import pytest
import torch
from conftest import counting_target, make_drafter, make_target, make_tokenizer

from mdflash import Target, decode
from mdflash.decoding.deployment import Deployment
from mdflash.decoding.dpara import DPara
from mdflash.decoding.drafter_runner import DrafterRunner
from mdflash.decoding.head_runner import HeadRunner
from mdflash.decoding.target_runner import TargetRunner

PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8], [9] * 12, [10], list(range(20, 60))]


def greedy_reference(target: Target, prompt: list[int], count: int) -> tuple[int, ...]:
    """Plain argmax with the Hugging Face model and no cache."""
    ids = torch.tensor([prompt])
    with torch.no_grad():
        for _ in range(count):
            ids = torch.cat([ids, target.model(input_ids=ids, use_cache=False).logits[:, -1].argmax(-1)[:, None]], 1)
    return tuple(ids[0, len(prompt) :].tolist())


@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
def test_greedy_is_token_exact(family, head):
    target = make_target(family, tie_word_embeddings=head == "rnn")
    drafter = make_drafter(target, head=head)
    expected = [greedy_reference(target, prompt, 24) for prompt in PROMPTS]
    for method in ("autoregressive", "dspark", "dpara"):
        results = decode(target, drafter, PROMPTS, method, 24, stop_ids=[], batch_size=3, devices="cpu,cpu")
        assert [r.token_ids for r in results] == expected
        assert all(r.finish_reason == "length" and sum(x.committed for x in r.rounds) == 23 for r in results)


def test_dflash_needs_rank_zero_and_the_reverse(target, drafter):
    rank_zero = make_drafter(target, rank=0)
    expected = [greedy_reference(target, prompt, 12) for prompt in PROMPTS]
    assert [r.token_ids for r in decode(target, rank_zero, PROMPTS, "dflash", 12, stop_ids=[])] == expected
    with pytest.raises(ValueError, match="rank-0"):
        decode(target, drafter, PROMPTS, "dflash", 12)
    with pytest.raises(ValueError, match="use 'dflash'"):
        decode(target, rank_zero, PROMPTS, "dspark", 12)


@pytest.mark.parametrize("method", ["autoregressive", "dspark", "dpara"])
@pytest.mark.parametrize(
    "sampling", [{"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.8}, {"temperature": 1.3, "top_k": 5}]
)
def test_tokens_do_not_depend_on_the_batch(target, drafter, method, sampling):
    runs = [
        decode(target, drafter, PROMPTS, method, 16, stop_ids=[], batch_size=size, seed=3, **sampling)
        for size in (1, 2, 5)
    ]
    assert [r.token_ids for r in runs[0]] == [r.token_ids for r in runs[1]] == [r.token_ids for r in runs[2]]
    other_seed = decode(target, drafter, PROMPTS, method, 16, stop_ids=[], batch_size=5, seed=4, **sampling)
    assert [r.token_ids for r in other_seed] != [r.token_ids for r in runs[0]]


@pytest.mark.parametrize("method", ["autoregressive", "dspark", "dpara"])
@pytest.mark.parametrize("budget", [1, 2, 5, 13])
def test_budget_is_exact(target, drafter, method, budget):
    for result in decode(target, drafter, PROMPTS, method, budget, temperature=1.0, stop_ids=[], batch_size=5):
        assert len(result.token_ids) == budget
        assert sum(r.committed for r in result.rounds) == budget - 1
        assert result.finish_reason == "length"
        assert (result.tau is None) == (budget == 1)


@pytest.mark.parametrize("method", ["autoregressive", "dspark", "dpara"])
def test_stop_ids_end_a_request_wherever_they_appear(method):
    target = counting_target()
    drafter = make_drafter(target, d=3, taps=(-1, 0, 1))
    results = decode(target, drafter, [[3], [8], [20]], method, 40, stop_ids=[10, 25], batch_size=3)
    assert [r.token_ids for r in results] == [tuple(range(4, 11)), (9, 10), tuple(range(21, 26))]
    assert all(r.finish_reason == "stop" for r in results)
    first_is_stop = decode(target, drafter, [[9]], method, 40, stop_ids=[10])[0]
    assert (first_is_stop.token_ids, first_is_stop.rounds) == ((10,), ())


def test_stop_strings_and_chat_prompts():
    tokenizer = make_tokenizer()
    target = make_target(vocab=len(tokenizer))
    target.tokenizer = tokenizer
    target.model.generation_config.eos_token_id = tokenizer.eos_token_id
    drafter = make_drafter(target)
    chat = [{"role": "user", "content": "hello"}]
    free = decode(target, drafter, ["hello", chat], "dpara", 30, stop_ids=[])
    assert free[0].token_ids == free[1].token_ids
    text = tokenizer.decode(free[0].token_ids, skip_special_tokens=True)
    stop = text[len(text) // 2 :][:2]
    stopped = decode(target, drafter, ["hello"], "dpara", 30, stop_ids=[], stop_strings=[stop])[0]
    cut = tokenizer.decode(stopped.token_ids, skip_special_tokens=True)
    assert stopped.finish_reason == "stop"
    assert stop in cut
    assert stop not in tokenizer.decode(stopped.token_ids[:-1], skip_special_tokens=True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"method": "magic"}, "use one of autoregressive"),
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"temperature": -1.0}, "temperature=-1"),
        ({"top_p": 0.0}, "top_p=0"),
        ({"top_k": -1}, "top_k=-1"),
        ({"prompts": [[]]}, "prompt 0 is empty"),
        ({"prompts": [[1, 97]]}, "outside 0..96"),
        ({"prompts": [[1] * 500], "max_new_tokens": 13}, "512 positions"),
        ({"prompts": ["text"]}, "tokenizer"),
        ({"prompts": "text"}, "list of prompts"),
        ({"stop_strings": ["x"]}, "tokenizer"),
        ({"stop_strings": "x"}, "list of non-empty strings"),
        ({"stop_strings": [""]}, "list of non-empty strings"),
        ({"drafter": None}, "needs a drafter"),
        ({"devices": "cpu,cpu,cpu"}, "devices"),
        ({"runner": "slow"}, "runner='slow'"),
        ({"lm_head": "none"}, "lm_head='none'"),
        ({"head_device": "cpu"}, "head_device='cpu': use one of drafter, target"),
        ({"head_device": "target", "lm_head": "all"}, "only the branch taken"),
        ({"drafter_timeout_s": 0}, "drafter_timeout_s=0: use a positive number"),
        ({"drafter_timeout_s": "5"}, "drafter_timeout_s='5'"),
        ({"drafter_address": ""}, "address='': use HOST:PORT"),
        ({"drafter_address": "127.0.0.1:99999"}, "port 1 to 65535"),
        ({"drafter_address": "127.0.0.1:9", "method": "dspark"}, "only 'dpara' drafts in another process"),
        ({"devices": "cuda:7", "method": "autoregressive"}, "0 CUDA devices|CUDA devices; use"),
        ({"devices": "meta"}, "decoding runs on cpu or cuda"),
        ({"prompts": [1, 2, 3]}, "prompt 0 is '1'"),
        ({"prompts": {"role": "user"}}, "not a list of prompts"),
        ({"prompts": [[{"role": "user"}]]}, "messages with role and content"),
        ({"max_new_tokens": 2.5}, "max_new_tokens=2.5: use an integer"),
        ({"batch_size": True}, "batch_size=True: use an integer"),
        ({"stop_ids": "abc"}, "stop_ids='abc'"),
        ({"stop_ids": 5}, "stop_ids=5"),
        ({"stop_strings": [5]}, "list of non-empty strings"),
    ],
)
def test_bad_input_is_refused(target, drafter, arguments, message):
    call = {"drafter": drafter, "prompts": [[1, 2]], "method": "dpara", "max_new_tokens": 4} | arguments
    with pytest.raises(ValueError, match=message):
        decode(target, **call)


def test_a_target_loaded_with_another_attention_decodes_the_same():
    target = make_target()
    expected = decode(target, None, PROMPTS, "autoregressive", 12, stop_ids=[])
    target.model.set_attn_implementation("eager")
    results = decode(target, None, PROMPTS, "autoregressive", 12, stop_ids=[])
    assert [r.token_ids for r in results] == [r.token_ids for r in expected]
    assert target.config._attn_implementation == "eager"


def test_no_prompts_no_results(target, drafter):
    assert decode(target, drafter, [], "dpara") == []


def test_precompute_overlaps_the_verify_pass(target, drafter, monkeypatch):
    """Both passes are made slow: a round must cost about one of them, and none may start after the barrier."""
    tree, verify, spans = DrafterRunner.tree, TargetRunner.verify, []

    def slow(pass_):
        def run(*args):
            began = time.perf_counter()
            out = pass_(*args)
            time.sleep(0.05)
            spans.append((began, time.perf_counter()))
            return out

        return run

    monkeypatch.setattr(DrafterRunner, "tree", slow(tree))
    monkeypatch.setattr(TargetRunner, "verify", slow(verify))
    result = decode(target, drafter, [[1, 2, 3]], "dpara", 6, stop_ids=[])[0]
    pairs = list(zip(sorted(spans)[::2], sorted(spans)[1::2], strict=True))
    assert len(pairs) == 1 + len(result.rounds)  # the first is the warm-up's
    assert all(second[0] < first[1] for first, second in pairs)
    assert not any(r.fallback for r in result.rounds)


def test_a_pass_after_the_barrier_is_counted_as_fallback(target, drafter, monkeypatch):
    """A head that drafts anew after the barrier: every block but the cold start's fell back."""
    tree, branch = DrafterRunner.tree, HeadRunner.branch
    calls = []

    def remembering(self, *args):
        calls.append((self, args))
        return tree(self, *args)

    def redrafting(self, branches, *outcome):
        runner, args = calls[-1]
        return branch(self, tree(runner, *args), *outcome)

    monkeypatch.setattr(DrafterRunner, "tree", remembering)
    monkeypatch.setattr(HeadRunner, "branch", redrafting)
    result = decode(target, drafter, [[1, 2, 3]], "dpara", 6, stop_ids=[])[0]
    assert [r.fallback for r in result.rounds] == [False] + [True] * (len(result.rounds) - 1)
    assert len(result.rounds) > 1


def test_a_failed_or_stuck_drafter_is_a_bounded_error(target, drafter, monkeypatch):
    def failing(self, *args):
        raise MemoryError("no room")

    monkeypatch.setattr(DrafterRunner, "tree", failing)
    with pytest.raises(RuntimeError, match="failed: MemoryError: no room"):
        decode(target, drafter, [[1, 2]], "dpara", 6, stop_ids=[])
    monkeypatch.setattr(DrafterRunner, "tree", lambda self, *args: time.sleep(1.5))
    began = time.perf_counter()
    with pytest.raises(RuntimeError, match=r"within 0\.2 s"):
        decode(target, drafter, [[1, 2]], "dpara", 6, stop_ids=[], drafter_timeout_s=0.2)
    assert time.perf_counter() - began < 1.2


def test_on_round_streams_every_token(target, drafter):
    seen = {}
    results = decode(
        target, drafter, PROMPTS, "dpara", 9, stop_ids=[], batch_size=2,
        on_round=lambda index, request: seen.setdefault(index, []).append(tuple(request.token_ids)),
    )  # fmt: skip
    for index, result in enumerate(results):
        assert seen[index][-1] == result.token_ids
        assert len(seen[index]) == len(result.rounds) + 1


@pytest.mark.gpu
@pytest.mark.parametrize("attention", ["dense", "flex"])
def test_one_gpu_gives_the_cpu_tokens(attention):
    target = make_target(hidden=64)
    drafter = make_drafter(target)
    expected = [r.token_ids for r in decode(target, drafter, PROMPTS, "dpara", 24, stop_ids=[], batch_size=3)]
    drafter.attention = attention
    results = decode(
        target, drafter, PROMPTS, "dpara", 24, stop_ids=[], batch_size=3, devices="cuda:0,cuda:0", runner="eager"
    )
    assert [r.token_ids for r in results] == expected


def test_free_rows_take_the_next_request_at_once(target, drafter, monkeypatch):
    """Two rows, five requests of which the first is long: the other row serves the rest meanwhile."""
    fills, fill = [], DPara.fill
    monkeypatch.setattr(
        DPara, "fill", lambda self, rows, prompts, seeds: fills.append(rows) or fill(self, rows, prompts, seeds)
    )
    stop = decode(target, drafter, [PROMPTS[0]], "dpara", 24, stop_ids=[])[0].token_ids
    others = [PROMPTS[1]] * 4
    short = decode(target, drafter, others[:1], "autoregressive", 24, stop_ids=[])[0].token_ids
    ends = next(token for token in short if token not in stop)  # ends the others, never the first
    results = decode(target, drafter, [PROMPTS[0], *others], "dpara", 24, stop_ids=[ends], batch_size=2)
    assert results[0].token_ids == stop
    assert all(r.token_ids == short[: short.index(ends) + 1] for r in results[1:])
    assert fills[1:] == [[0, 1], [1], [1], [1]]


@pytest.mark.parametrize("method", ["autoregressive", "dspark", "dpara"])
def test_a_host_that_looks_late_changes_no_result(target, drafter, method, monkeypatch):
    """Outcomes read two rounds late: the same tokens, rounds and stops; what a finished row did meanwhile is dropped."""
    settings = dict(method=method, max_new_tokens=17, temperature=1.0, stop_ids=[5, 11], batch_size=2, seed=1)
    at_once = decode(target, drafter, PROMPTS * 2, **settings)
    monkeypatch.setattr(Deployment, "rounds_ahead", lambda self, device: 2)
    late = decode(target, drafter, PROMPTS * 2, **settings)
    assert [(r.token_ids, r.finish_reason, r.rounds) for r in late] == [
        (r.token_ids, r.finish_reason, r.rounds) for r in at_once
    ]
    assert {r.finish_reason for r in late} == {"stop", "length"}
