"""Chat: what is supervised is exactly what the target would have written after the prompt that it would have read."""

import pytest
from conftest import make_tokenizer

from mdflash.chat import Chat, texts_of

# ChatML as Qwen3 renders it: thinking off puts an empty think block into the prompt, and earlier turns lose theirs.
FORGETFUL = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content.split('</think>')[-1] if m.role == 'assistant' else m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
TURNS = [
    {"role": "user", "content": "Hi?"},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "And?"},
    {"role": "assistant", "content": "Bye!"},
]


@pytest.fixture
def chat() -> Chat:
    return Chat(make_tokenizer(FORGETFUL), stop_ids=[2])


def plain_chat() -> Chat:
    return Chat(make_tokenizer(), stop_ids=[2])


def supervised(chat: Chat, sample) -> list[str]:
    return [chat.tokenizer.decode(sample.ids[start:end]) for start, end in sample.spans]


def test_span_is_the_answer_and_its_end_of_turn(chat):
    (sample,) = chat.samples(TURNS[:2], "a")
    ((start, end),) = sample.spans
    assert list(sample.ids[start:end]) == [*chat.tokenizer("Hello.", add_special_tokens=False)["input_ids"], 2]
    assert end == len(sample.ids)
    assert sample.supervised == end - start


def test_prefix_is_the_prompt_of_decoding_token_for_token(chat):
    (sample,) = chat.samples(TURNS[:2], "a")
    assert list(sample.ids[: sample.spans[0][0]]) == chat.prompt(TURNS[:1])


def test_empty_think_block_is_read_but_not_supervised(chat):
    (sample,) = chat.samples(TURNS[:2], "a")
    assert "<think>" in chat.tokenizer.decode(sample.ids)
    assert supervised(chat, sample) == ["Hello.<|im_end|>"]


def test_thinking_changes_the_prompt(chat):
    thinking = Chat(chat.tokenizer, [2], thinking=True)
    assert thinking.prompt(TURNS[:1]) != chat.prompt(TURNS[:1])


def test_template_that_drops_earlier_thinking_splits_the_conversation(chat):
    first, second = chat.samples(TURNS, "a")
    assert (first.id, second.id) == ("a#0", "a#1")
    assert supervised(chat, first) == ["Hello.<|im_end|>"]
    assert supervised(chat, second) == ["Bye!<|im_end|>"]
    assert list(second.ids[: second.spans[0][0]]) == chat.prompt(TURNS[:3])


def test_template_that_keeps_turns_gives_one_sample_with_two_spans():
    chat = plain_chat()
    (sample,) = chat.samples(TURNS, "a")
    assert sample.id == "a"
    assert supervised(chat, sample) == ["Hello.<|im_end|>", "Bye!<|im_end|>"]
    assert list(sample.ids[: sample.spans[1][0]]) == chat.prompt(TURNS[:3])


def test_answer_cut_at_its_length_has_no_end_of_turn(chat):
    cut = [TURNS[0], TURNS[1] | {"finish_reason": "length"}]
    (sample,) = chat.samples(cut, "a")
    assert supervised(chat, sample) == ["Hello."]
    (whole,) = chat.samples([TURNS[0], TURNS[1] | {"finish_reason": "stop"}], "a")
    assert whole.ids[-1] == 2


def test_without_an_assistant_turn_there_is_no_sample(chat):
    assert chat.samples(TURNS[:1], "a") == []
    assert chat.samples([TURNS[0], {"role": "assistant", "content": ""}], "a") == []
    with pytest.raises(ValueError, match="none of the 1 conversations has an assistant token"):
        texts_of(chat, [{"id": "a", "messages": TURNS[:1]}])


def test_max_length_cuts_text_and_spans():
    chat = plain_chat()
    (whole,) = chat.samples(TURNS, "a")
    (first, first_end), (second, second_end) = whole.spans
    (cut,) = chat.samples(TURNS, "a", max_length=second + 2)
    assert cut.ids == whole.ids[: second + 2]
    assert cut.spans == ((first, first_end), (second, second + 2))
    (shorter,) = chat.samples(TURNS, "a", max_length=second)
    assert shorter.spans == ((first, first_end),)
    assert chat.samples(TURNS, "a", max_length=first) == []
    assert chat.samples(TURNS, "a", max_length=second_end + 9) == [whole]


def test_empty_rows_are_counted(chat):
    rows = [{"id": "a", "messages": TURNS[:2]}, {"id": "b", "messages": TURNS[:1]}]
    samples, empty = texts_of(chat, rows)
    assert ([sample.id for sample in samples], empty) == (["a"], 1)


def test_template_that_never_writes_a_stop_id_is_refused(chat):
    other = Chat(chat.tokenizer, stop_ids=[0])
    assert other.prompt([{"role": "user", "content": "a"}])  # decoding needs no end of turn, training texts do
    with pytest.raises(ValueError, match="eos_token_id"):
        other.samples([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "x")
