"""What comes in and goes out of `decode`: prompts in three forms, requests under way, when one ends."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from numbers import Integral

from ..chat import Chat
from ..target import Target
from .types import RequestResult, Round

Prompt = str | Sequence[int] | Sequence[dict]


@dataclass
class Request:
    """A request in flight: what has been committed so far."""

    index: int
    prompt: list[int]
    token_ids: list[int] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    finish_reason: str | None = None
    prefill_s: float = 0.0
    decode_s: float = 0.0
    began: float = 0.0  # when decoding began, on the host's clock

    def result(self) -> RequestResult:
        return RequestResult(
            tuple(self.token_ids),
            self.finish_reason,
            tuple(self.rounds),
            len(self.prompt),
            self.prefill_s,
            self.decode_s,
        )


@dataclass(frozen=True)
class Stopping:
    """When a request ends: a stop id, a stop string in the decoded answer, or exactly `max_new_tokens` tokens."""

    max_new_tokens: int
    stop_ids: tuple[int, ...]
    stop_strings: tuple[str, ...]
    tokenizer: object

    def commit(self, request: Request, tokens: Sequence[int]) -> int:
        """Append tokens one by one until the request ends; returns how many were counted."""
        for count, token in enumerate(tokens, start=1):
            request.token_ids.append(token)
            if token in self.stop_ids or (self.stop_strings and self._has_stop_string(request.token_ids)):
                request.finish_reason = "stop"
            elif len(request.token_ids) == self.max_new_tokens:
                request.finish_reason = "length"
            if request.finish_reason:
                return count
        return len(tokens)

    def _has_stop_string(self, token_ids: list[int]) -> bool:
        text = self.tokenizer.decode(token_ids, skip_special_tokens=True)
        return any(stop in text for stop in self.stop_strings)


def check_types(prompts, stop_ids, stop_strings, **integers) -> None:
    """Raise ValueError for arguments of `decode` that are not what they must be."""
    for name, value in integers.items():
        if type(value) is not int:
            raise ValueError(f"{name}={value!r}: use an integer")
    if isinstance(prompts, str) or not isinstance(prompts, Sequence):
        raise ValueError(f"prompts is {type(prompts).__name__}, not a list of prompts: wrap a single one in a list")
    for i, prompt in enumerate(prompts):
        messages = isinstance(prompt, Sequence) and prompt and all(isinstance(part, dict) for part in prompt)
        ids = isinstance(prompt, Sequence) and all(isinstance(part, Integral) for part in prompt)
        if not (
            isinstance(prompt, str) or ids or (messages and all({"role", "content"} <= part.keys() for part in prompt))
        ):
            raise ValueError(
                f"prompt {i} is {str(prompt)[:60]!r}: use a string, token ids, or messages with role and content"
            )
    if stop_ids is not None and (isinstance(stop_ids, str) or not all_are(Integral, stop_ids)):
        raise ValueError(f"stop_ids={stop_ids!r}: pass a list of token ids, or None for the target's")
    if isinstance(stop_strings, str) or not all_are(str, stop_strings) or "" in stop_strings:
        raise ValueError(f"stop_strings={stop_strings!r}: pass a list of non-empty strings")


def all_are(kind: type, values: object) -> bool:
    """Whether it is a sequence (or set) of such values."""
    return isinstance(values, Collection) and all(isinstance(value, kind) for value in values)


def prompt_ids(target: Target, prompt: Prompt, thinking: bool) -> list[int]:
    """Token ids of a prompt in any of its three forms."""
    if isinstance(prompt, str) or (len(prompt) > 0 and isinstance(prompt[0], dict)):
        if target.tokenizer is None:
            raise ValueError("text prompts need a tokenizer: load the target with load_target, or pass token ids")
        if isinstance(prompt, str) and not target.tokenizer.chat_template:
            return target.tokenizer(prompt)["input_ids"]
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return Chat(target.tokenizer, target.stop_ids, thinking).prompt(messages)
    return [int(token) for token in prompt]


def check_prompts(target: Target, requests: list[Request], max_new_tokens: int) -> None:
    """Every prompt is non-empty, inside the vocabulary, and leaves room for the answer."""
    vocab = target.config.vocab_size
    limit = getattr(target.config, "max_position_embeddings", None)
    for request in requests:
        if not request.prompt:
            raise ValueError(f"prompt {request.index} is empty: a request needs at least one token")
        if not 0 <= min(request.prompt) <= max(request.prompt) < vocab:
            raise ValueError(
                f"prompt {request.index} holds ids outside 0..{vocab - 1}: was it made with another tokenizer?"
            )
        if limit and len(request.prompt) + max_new_tokens > limit:
            raise ValueError(
                f"prompt {request.index} of {len(request.prompt)} tokens plus max_new_tokens={max_new_tokens} exceeds the "
                f"target's {limit} positions: shorten one of them"
            )
