"""Chat tokenisation: prompts, and conversations whose assistant tokens are known by construction, not by searching.

A conversation is built the way decoding builds it: the template's rendering up to an answer (the generation prompt, token
for token what evaluation feeds), then the answer's own tokens, then the end-of-turn token the target would emit.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from transformers import PreTrainedTokenizerBase

Message = Mapping[str, str]


@dataclass(frozen=True)
class Sample:
    """One training text. ids: T token ids. spans: half-open [start, end) token ranges the assistant wrote. id: stable."""

    id: str
    ids: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]

    @property
    def supervised(self) -> int:
        """Number of assistant tokens."""
        return sum(end - start for start, end in self.spans)


class Chat:
    """The target's chat format. thinking: passed to the template as `enable_thinking` (off by default, recorded)."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop_ids: Sequence[int], thinking: bool = False):
        if not tokenizer.chat_template:
            raise ValueError(f"tokenizer of {tokenizer.name_or_path} has no chat template: use an instruct target")
        self.tokenizer, self.thinking, self.stop_ids = tokenizer, thinking, tuple(stop_ids)

    @property
    def template_hash(self) -> str:
        """sha256 of the chat template, recorded wherever its renderings are used."""
        return hashlib.sha256(self.tokenizer.chat_template.encode()).hexdigest()

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of messages with the generation prompt appended: what decoding starts from."""
        return self._render(messages, add_generation_prompt=True)

    def samples(self, messages: Sequence[Message], sample_id: str, max_length: int | None = None) -> list[Sample]:
        """The training texts of one conversation; usually one.

        An answer whose generation prompt does not continue the text so far (templates drop earlier thinking, say) starts a
        text of its own, so every supervised token follows exactly the prompt that decoding would have seen. Texts are cut at
        max_length tokens; one without an assistant token is left out.
        """
        texts, ids, spans = [], [], []
        for turn, message in enumerate(messages):
            if message["role"] != "assistant" or not message["content"]:
                continue
            prefix = self.prompt(messages[:turn])
            if ids and prefix[: len(ids)] != ids:
                texts.append((ids, spans))
                spans = []
            answer = self.tokenizer(message["content"], add_special_tokens=False)["input_ids"]
            if message.get("finish_reason") != "length":
                answer = [*answer, self.end_of_turn]
            ids = prefix + answer
            spans = [*spans, (len(prefix), len(ids))]
        if ids:
            texts.append((ids, spans))
        samples = []
        for part, (text, text_spans) in enumerate(texts):
            limit = min(max_length or len(text), len(text))
            kept = tuple((start, min(end, limit)) for start, end in text_spans if start < limit)
            if kept:
                name = sample_id if len(texts) == 1 else f"{sample_id}#{part}"
                samples.append(Sample(name, tuple(text[:limit]), kept))
        return samples

    def _render(self, messages: Sequence[Message], add_generation_prompt: bool) -> list[int]:
        plain = [{"role": message["role"], "content": message["content"]} for message in messages]
        text = self.tokenizer.apply_chat_template(
            plain, tokenize=False, add_generation_prompt=add_generation_prompt, enable_thinking=self.thinking
        )
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    @cached_property
    def end_of_turn(self) -> int:
        """The stop id that the template itself puts after an answer."""
        rendered = self._render(
            [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], add_generation_prompt=False
        )
        stops = [token for token in rendered if token in self.stop_ids]
        if not stops:
            raise ValueError(
                f"the chat template writes none of the stop ids {list(self.stop_ids)} after an answer: set the target's "
                "generation_config.eos_token_id to its end-of-turn token"
            )
        return stops[-1]


def texts_of(chat: Chat, rows: Iterable[Mapping], max_length: int | None = None) -> tuple[list[Sample], int]:
    """All samples of JSONL rows ({"id", "messages"}), and how many rows had no assistant token within max_length."""
    samples, empty = [], 0
    for number, row in enumerate(rows):
        if not isinstance(row.get("messages"), list):
            raise ValueError(f"row {number} has no `messages` list: conversations are rows of {{id, messages}}")
        found = chat.samples(row["messages"], str(row.get("id", number)), max_length)
        samples += found
        empty += not found
    if not samples:
        raise ValueError(
            f"none of the {empty} conversations has an assistant token to learn from: check roles and max_length"
        )
    return samples, empty
