"""Answers: what is generated, how an interrupted run goes on, which runs are refused. A random two-layer target."""

import json
from pathlib import Path

import pytest
import torch
from conftest import make_tokenizer
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

from data import answers
from data.prompts import read_prompts
from mdflash import load_target
from mdflash.chat import Chat
from mdflash.conversations import load_chat, prompt_id, read_conversations, split_held_out
from mdflash.recipe import DataSection, Recipe, TargetSection

EOS, TOKENS = 2, 12


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Threads only slow such small models down."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory) -> Path:
    """A random Qwen3 whose own generation config asks for sampling that must not leak into the answers."""
    folder = tmp_path_factory.mktemp("target")
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=1, head_dim=16, max_position_embeddings=256,
            initializer_range=0.5, eos_token_id=EOS, pad_token_id=0,
        )
    )  # fmt: skip
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=0.3, top_k=3, top_p=0.5, repetition_penalty=3.0, eos_token_id=EOS, pad_token_id=0
    )
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def recipe(tmp_path, monkeypatch, target_dir) -> Recipe:
    """Ten prompts of different lengths, greedy and sampled, in batches of four."""
    monkeypatch.chdir(tmp_path)
    rows = [{"id": f"p{i}", "turns": ["Why? " * (1 + i % 4) + str(i), "never asked"]} for i in range(10)]
    Path("prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = DataSection(prompts="prompts.jsonl", temperatures=[0.0, 0.8], max_new_tokens=TOKENS, batch_size=4)
    return Recipe("tiny", target=TargetSection(str(target_dir), dtype="float32"), data=data)


def rows_by_id(recipe: Recipe) -> dict[str, dict]:
    return {row["id"]: row for row in read_conversations(recipe.answers_file)}


@torch.no_grad()
def greedy(target, ids: list[int]) -> list[int]:
    """One token at a time, without cache or padding."""
    answer = []
    while len(answer) < TOKENS and EOS not in answer:
        answer.append(int(target.model(torch.tensor([ids + answer])).logits[0, -1].argmax()))
    return answer


def test_every_prompt_and_temperature_is_answered(recipe):
    manifest = answers.write_answers(recipe)
    rows = rows_by_id(recipe)
    assert set(rows) == {f"p{i}@t{t}" for i in range(10) for t in ("0", "0.8")}
    assert manifest["complete"]
    counts = manifest["counts"]
    assert counts["prompts"] == 10
    assert counts["answers"] == counts["finished"] + counts["cut"] == len(rows)
    assert counts["answers"] + counts["empty"] == 20
    assert manifest["answers_sha256"] == answers.sha256_of(recipe.answers_file)
    assert manifest == json.loads(answers.manifest_path(recipe.answers_file).read_text())
    question, reply = rows["p1@t0"]["messages"]
    assert question == {"role": "user", "content": "Why? Why? 1"}
    assert reply["role"] == "assistant"
    assert "<|im_end|>" not in reply["content"]


def test_greedy_answers_are_the_targets_argmax_after_the_chat_prompt(recipe):
    answers.write_answers(recipe)
    target = load_target(recipe.target.path, "float32")
    chat = Chat(target.tokenizer, target.stop_ids)
    rows = rows_by_id(recipe)
    for i in range(10):
        *question, reply = rows[f"p{i}@t0"]["messages"]
        expected = answers.to_answer(chat, greedy(target, chat.prompt(question)))
        assert reply["content"] == expected.content
        assert reply["finish_reason"] == expected.finish_reason


def test_the_model_reads_exactly_the_chat_prompt(recipe, monkeypatch):
    target = load_target(recipe.target.path, "float32")
    chat, seen = load_chat(recipe.target), []
    original = target.model.generate

    def generate(ids, attention_mask, **kwargs):
        seen.extend(row[mask.bool()].tolist() for row, mask in zip(ids, attention_mask, strict=True))
        return original(ids, attention_mask=attention_mask, **kwargs)

    monkeypatch.setattr(target.model, "generate", generate)
    prompts = read_prompts(recipe.data)
    for temperature, batch in answers.plan(prompts, recipe.data, chat, set(), None, set()):
        answers.generate(target, chat, batch, temperature, recipe.data)
    expected = [chat.prompt(prompt["messages"]) for prompt in prompts]
    assert sorted(seen) == sorted(expected * 2)
    assert chat.stop_ids == target.stop_ids == (EOS,)


def test_an_interrupted_run_goes_on_and_gives_the_same_file_content(recipe, capsys):
    answers.write_answers(recipe)
    whole = rows_by_id(recipe)
    content = recipe.answers_file.read_bytes()
    recipe.answers_file.write_bytes(content[: len(content) // 2])  # most likely inside a line
    manifest_file = answers.manifest_path(recipe.answers_file)
    manifest = json.loads(manifest_file.read_text())
    manifest_file.write_text(json.dumps({**manifest, "complete": False}))

    answers.write_answers(recipe)
    ids = [row["id"] for row in read_conversations(recipe.answers_file)]
    assert len(ids) == len(set(ids))
    assert rows_by_id(recipe) == whole

    capsys.readouterr()
    answers.write_answers(recipe)
    assert "is complete" in capsys.readouterr().out


def test_a_torn_last_line_is_cut_off(tmp_path):
    file = tmp_path / "answers.jsonl"
    file.write_bytes(b'{"id": "a"}\n{"id": "b')
    answers.drop_torn_line(file)
    assert file.read_bytes() == b'{"id": "a"}\n'


def test_other_parameters_are_refused_by_name(recipe):
    answers.write_answers(recipe)
    recipe.data.max_new_tokens = 5
    with pytest.raises(ValueError, match=r"max_new_tokens was 12, is 5.*delete .*another name"):
        answers.write_answers(recipe)
    recipe.data.max_new_tokens, recipe.target.thinking = TOKENS, True
    with pytest.raises(ValueError, match="thinking was False, is True"):
        answers.write_answers(recipe)


def test_answers_without_their_manifest_and_edited_ones_are_refused(recipe):
    answers.write_answers(recipe)
    with recipe.answers_file.open("a") as file:
        file.write('{"id": "x", "messages": [{"role": "user", "content": "x"}]}\n')
    with pytest.raises(ValueError, match="not the file that its manifest describes"):
        answers.write_answers(recipe)
    answers.manifest_path(recipe.answers_file).unlink()
    with pytest.raises(ValueError, match=r"no manifest\.json"):
        answers.write_answers(recipe)


def test_empty_and_too_long_are_counted_and_not_written(recipe, monkeypatch):
    with Path("prompts.jsonl").open("a") as file:
        file.write(json.dumps({"id": "long", "turns": ["x" * 300]}) + "\n")
    original = answers.to_answer
    monkeypatch.setattr(
        answers,
        "to_answer",
        lambda chat, tokens: answers.Answer(" ", "stop", 1) if tokens[0] % 2 else original(chat, tokens),
    )
    manifest = answers.write_answers(recipe)
    counts = manifest["counts"]
    assert counts["too_long"] == 2
    assert counts["empty"] > 0
    assert counts["answers"] + counts["empty"] + counts["too_long"] == 22
    assert all(row["messages"][-1]["content"].strip() for row in read_conversations(recipe.answers_file))


def test_answer_text_ends_before_the_stop_token_or_the_torn_character(target_dir):
    chat = load_chat(TargetSection(str(target_dir)))
    hello = chat.tokenizer("hé", add_special_tokens=False)["input_ids"]
    assert answers.to_answer(chat, [*hello, EOS, 0, 0]) == answers.Answer("hé", "stop", len(hello) + 1)
    assert answers.to_answer(chat, hello[:-1]) == answers.Answer("h", "length", len(hello) - 1)


def test_batch_seeds_depend_on_ids_and_seed_only():
    batch = [answers.Job("a", [], [1]), answers.Job("b", [], [2])]
    assert answers.batch_seed(batch, 0) == answers.batch_seed([answers.Job("a", [], []), batch[1]], 0)
    assert answers.batch_seed(batch, 0) != answers.batch_seed(batch, 1)
    assert answers.batch_seed(batch, 0) != answers.batch_seed(batch[:1], 0)


def test_the_command_reports_errors_in_one_line(recipe, target_dir, capsys):
    config = {"name": "tiny", "target": {"path": str(target_dir)}, "data": {"prompts": "nowhere.jsonl"}}
    Path("recipe.yaml").write_text(json.dumps(config))
    assert answers.main(["--config", "recipe.yaml"]) == 2
    assert capsys.readouterr().err.startswith("error: data.prompts='nowhere.jsonl': no such file")


@pytest.mark.parametrize(
    "row",
    [
        {"id": "a", "turns": ["one", "two"]},
        {"id": "a", "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "one"}]},
        {"id": "a", "messages": [{"role": "user", "content": "one"}, {"role": "assistant", "content": "no"}]},
        {"id": "a", "conversations": [{"from": "human", "value": "one"}, {"from": "gpt", "value": "no"}]},
    ],
)
def test_prompt_forms(tmp_path, row):
    (tmp_path / "a.jsonl").write_text(json.dumps(row) + "\n")
    expected = [{"id": "a", "messages": [{"role": "user", "content": "one"}]}]
    assert read_prompts(DataSection(str(tmp_path / "a.jsonl"))) == expected
    assert read_prompts(DataSection(str(tmp_path))) == expected


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"bad\.jsonl:2: not JSON"),
        ('{"turns": ["x"]}', r"bad\.jsonl:2: no `id`"),
        ('{"id": "b"}', r"bad\.jsonl:2: neither `turns`"),
        ('{"id": "b", "turns": []}', r"bad\.jsonl:2: neither `turns`"),
        ('{"id": "b", "turns": [" "]}', r"bad\.jsonl:2: no user text"),
        ('{"id": "a", "turns": ["x"]}', r"bad\.jsonl:2: id 'a' is that of .*bad\.jsonl:1"),
    ],
)
def test_prompt_errors_name_file_and_line(tmp_path, line, message):
    (tmp_path / "bad.jsonl").write_text('{"id": "a", "turns": ["x"]}\n' + line + "\n")
    with pytest.raises(ValueError, match=message):
        read_prompts(DataSection(str(tmp_path / "bad.jsonl")))


def test_hub_prompts_pass_over_rows_without_a_question(monkeypatch):
    rows = [
        {"conversations": [{"from": "gpt", "value": "no"}]},
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
        {"conversations": [{"from": "human", "value": "r"}]},
    ]
    asked = {}
    monkeypatch.setattr("datasets.load_dataset", lambda name, **kwargs: asked.update(kwargs, name=name) or rows)
    found = read_prompts(DataSection("owner/set", prompts_revision="abc", limit=1))
    assert found == [{"id": "1", "messages": [{"role": "user", "content": "q"}]}]
    assert asked == {"name": "owner/set", "split": "train", "revision": "abc"}


def test_conversations_errors_name_file_and_line(tmp_path):
    file = tmp_path / "answers.jsonl"
    with pytest.raises(FileNotFoundError, match=r"python -m data\.answers"):
        read_conversations(file)
    good = '{"id": "a", "messages": [{"role": "user", "content": "x"}]}\n'
    for bad, message in (("nonsense", "not JSON"), ('{"id": 1}', "no string `id`"), ('{"id": "b"}', "`messages`")):
        file.write_text(good + bad + "\n")
        with pytest.raises(ValueError, match=rf"answers\.jsonl:2: .*{message}"):
            read_conversations(file)
    file.write_text(good + good)
    with pytest.raises(ValueError, match=r"answers\.jsonl:2: id 'a' is already on line 1"):
        read_conversations(file)


def test_held_out_prompts_never_straddle_the_split():
    rows = [{"id": f"p{i}@t{t}"} for i in range(20) for t in ("0", "0.7")]
    train, held = split_held_out(rows, 5)
    trained, held_prompts = ({prompt_id(row["id"]) for row in part} for part in (train, held))
    assert len(held_prompts) == 5
    assert len(held) == 10
    assert not trained & held_prompts
    assert split_held_out(rows[::-1], 5) == (train[::-1], held[::-1])
    assert split_held_out(rows, 0) == (rows, [])
    with pytest.raises(ValueError, match="held_out=20 of 20 prompts"):
        split_held_out(rows, 20)
