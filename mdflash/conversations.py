"""Target-written answers as training reads them: rows of JSONL, a held-out split, and the target's chat format."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from .chat import Chat
from .recipe import TargetSection


def read_conversations(path: str | Path) -> list[dict]:
    """The rows {"id", "messages": [{"role", "content"}, ...]} of a JSONL file, in order.

    Raises FileNotFoundError without the file, ValueError naming file and line of a malformed row or a repeated id.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: write it with `python -m data.answers --config RECIPE.yaml`")
    rows, first_line = [], {}
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            where = f"{path}:{number}"
            row = parse_conversation(line, where)
            if row["id"] in first_line:
                raise ValueError(f"{where}: id {row['id']!r} is already on line {first_line[row['id']]}: remove one")
            first_line[row["id"]] = number
            rows.append(row)
    return rows


def parse_conversation(line: str, where: str) -> dict:
    """One JSONL line as a conversation; `where` (file:line) opens the error."""
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not JSON ({error}): every line is one conversation") from None
    if not isinstance(row, dict) or not isinstance(row.get("id"), str):
        raise ValueError(f'{where}: no string `id`: a conversation is {{"id", "messages"}}')
    messages = row.get("messages")
    if not isinstance(messages, list) or not messages or not all(map(is_message, messages)):
        raise ValueError(f'{where}: `messages` of {row["id"]!r} must be a list of {{"role", "content"}} texts')
    return row


def is_message(message: object) -> bool:
    """Whether this is {"role": text, "content": text}; more keys are welcome."""
    return isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))


def prompt_id(row_id: str) -> str:
    """The prompt behind an answer: "gsm8k-7@t0.7" -> "gsm8k-7"."""
    return row_id.rsplit("@t", 1)[0]


def split_held_out(rows: Sequence[dict], held_out: int) -> tuple[list[dict], list[dict]]:
    """Split rows into (training, held-out), each in the given order, with exactly `held_out` prompts held out.

    The prompts of least hash are held out: row order does not matter, and answers to one prompt at several temperatures
    stay on one side. Raises ValueError when no prompt would be left to train on.
    """
    prompts = {prompt_id(row["id"]) for row in rows}
    if held_out < 0 or len(prompts) <= held_out:
        raise ValueError(
            f"held_out={held_out} of {len(prompts)} prompts: it must be at least 0 and leave a prompt to train on; "
            "lower data.held_out or answer more prompts"
        )
    ranked = sorted(prompts, key=lambda name: hashlib.sha256(name.encode()).hexdigest())
    chosen = set(ranked[:held_out])
    train = [row for row in rows if prompt_id(row["id"]) not in chosen]
    return train, [row for row in rows if prompt_id(row["id"]) in chosen]


def load_chat(target: TargetSection) -> Chat:
    """The target's chat format from its tokenizer and configuration; no weights are loaded."""
    source = {"revision": target.revision} | ({"gguf_file": target.gguf_file} if target.gguf_file else {})
    tokenizer = AutoTokenizer.from_pretrained(target.path, **source)
    return Chat(tokenizer, _stop_ids(target, source, tokenizer), target.thinking)


def _stop_ids(target: TargetSection, source: dict, tokenizer) -> tuple[int, ...]:
    """The same ids in the same order of precedence as `Target.stop_ids`."""
    try:
        generation = GenerationConfig.from_pretrained(target.path, revision=target.revision)
    except OSError:  # the target has no generation_config.json
        generation = None
    for config in (generation, AutoConfig.from_pretrained(target.path, **source), tokenizer):
        ids = getattr(config, "eos_token_id", None)
        if ids is not None:
            return tuple(ids) if isinstance(ids, list | tuple) else (ids,)
    return ()
