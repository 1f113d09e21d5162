"""Three steps of the tiny target: what it saves reloads, speaks ChatML and is not trained twice."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from data.word_problems import write


def load_recipe():
    path = Path(__file__).parents[2] / "recipes" / "train_tiny_target.py"
    spec = importlib.util.spec_from_file_location("train_tiny_target", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


recipe = load_recipe()


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    write(folder, texts=200, prompts=1, held_out=1)
    settings = recipe.Settings(folder / "texts.jsonl", folder / "target", steps=3, held_out=2, layers=2, threads=1)
    recipe.main(settings)
    return settings


def test_saved_folder_reloads(settings):
    tokenizer = AutoTokenizer.from_pretrained(settings.output)
    model = AutoModelForCausalLM.from_pretrained(settings.output)
    assert model.config.model_type == "qwen3"
    assert model.dtype == torch.float32
    assert model.config.vocab_size == len(tokenizer) <= settings.vocab_size
    assert (tokenizer.pad_token, tokenizer.eos_token) == ("<|endoftext|>", "<|im_end|>")
    assert (model.generation_config.pad_token_id, model.generation_config.eos_token_id) == (0, 2)
    assert tokenizer.convert_tokens_to_ids(list(recipe.SPECIAL_TOKENS)) == [0, 1, 2, 3]
    assert tokenizer.mask_token_id == recipe.MASK_ID == 3


def test_tokenizer_round_trips(settings):
    tokenizer = AutoTokenizer.from_pretrained(settings.output)
    text = "Zoe buys 12 kettles,\nso 12 * 9 = 108. Größe 🙂 <|im_end|>"
    ids = tokenizer(text).input_ids
    assert tokenizer.decode(ids) == text
    assert ids[-1] == tokenizer.eos_token_id


@pytest.mark.parametrize("thinking", [{}, {"enable_thinking": False}])
def test_template_with_and_without_generation_prompt(settings, thinking):
    tokenizer = AutoTokenizer.from_pretrained(settings.output)
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": "Two?"},
    ]
    plain = tokenizer.apply_chat_template(messages, tokenize=False, **thinking)
    assert plain == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nOne?<|im_end|>\n"
        "<|im_start|>assistant\nYes.<|im_end|>\n<|im_start|>user\nTwo?<|im_end|>\n"
    )
    prompted = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **thinking)
    assert prompted == plain + "<|im_start|>assistant\n"


def test_batches_cover_every_text_once_an_epoch(settings):
    lengths = [length % 7 for length in range(50)]
    stream = recipe.batches(lengths, settings)
    epoch = [next(stream) for _ in range(5)]
    assert sorted(index for batch in epoch for index in batch) == list(range(50))
    again = recipe.batches(lengths, settings)
    assert epoch == [next(again) for _ in range(5)]


def test_complete_output_is_kept_and_torn_output_is_redone(settings, capsys):
    weights = settings.output / "model.safetensors"
    before = weights.read_bytes()
    recipe.main(settings)
    assert "up to date" in capsys.readouterr().out

    weights.write_bytes(before[:100])
    recipe.main(settings)
    assert weights.read_bytes() == before, "the same seed gives the same weights"
    assert [path.name for path in settings.output.parent.glob("target*")] == ["target"]
    assert json.loads((settings.output / "recipe.json").read_text())["settings"]["steps"] == 3


def test_errors_name_the_value_and_the_remedy(settings, tmp_path):
    with pytest.raises(ValueError, match="hidden_size=100 must be a multiple of 64"):
        recipe.Settings(settings.texts, tmp_path, hidden_size=100)
    (tmp_path / "notes.txt").write_text("not ours")
    with pytest.raises(ValueError, match="holds something else"):
        recipe.main(recipe.Settings(settings.texts, tmp_path, steps=3))
    with pytest.raises(ValueError, match="leaves none of the 200 texts"):
        recipe.main(recipe.Settings(settings.texts, tmp_path / "new", held_out=200))
