"""Prompts from a JSONL file, a folder of them or a hub dataset, all as {"id", "messages": [user turns]}.

A row is {"id", "turns": [user text, ...]}, {"id", "messages": [{"role", "content"}, ...]} or, in ShareGPT form,
{"conversations": [{"from", "value"}, ...]}. Only the user turns before the first answer are used.
"""

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from mdflash.conversations import is_message
from mdflash.recipe import DataSection

USER_NAMES = ("human", "user")
ANSWER_NAMES = ("gpt", "assistant", "chatgpt", "model")


def read_prompts(data: DataSection) -> list[dict]:
    """The first `data.limit` prompts (0 takes all) of `data.prompts`, in order.

    Raises FileNotFoundError for a path that leads nowhere, ValueError naming file and line of a row of another form.
    Rows of a hub dataset that open with an answer or with an empty turn hold no prompt and are passed over.
    """
    path = Path(data.prompts)
    if path.exists():
        prompts = _local_prompts(path)
    elif data.prompts.count("/") == 1 and not data.prompts.startswith((".", "/")) and path.suffix != ".jsonl":
        prompts = _hub_prompts(data)
    else:
        raise FileNotFoundError(
            f"data.prompts={data.prompts!r}: no such file or folder, and not a hub dataset id of the form owner/name"
        )
    found, places = [], {}
    for prompt, where in islice(prompts, data.limit or None):
        if prompt["id"] in places:
            raise ValueError(
                f"{where}: id {prompt['id']!r} is that of {places[prompt['id']]}: give each prompt its own"
            )
        places[prompt["id"]] = where
        found.append(prompt)
    if not found:
        raise ValueError(f"data.prompts={data.prompts!r} holds no prompt: name a file, folder or dataset with some")
    return found


def _local_prompts(path: Path) -> Iterator[tuple[dict, str]]:
    files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    for file in files:
        with file.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                where = f"{file}:{number}"
                try:
                    row = json.loads(line)
                except json.JSONDecodeError as error:
                    raise ValueError(f"{where}: not JSON ({error}): every line is one prompt") from None
                if not isinstance(row, dict) or not isinstance(row.get("id"), str | int):
                    raise ValueError(f'{where}: no `id`: a prompt is {{"id", "turns"}} or {{"id", "messages"}}')
                messages = user_turns(row, where)
                if not messages:
                    raise ValueError(f"{where}: no user text before the first answer: start with a non-empty user turn")
                yield {"id": str(row["id"]), "messages": messages}, where


def _hub_prompts(data: DataSection) -> Iterator[tuple[dict, str]]:
    try:
        from datasets import load_dataset
    except ImportError:
        raise ValueError(f"data.prompts={data.prompts!r} is a hub dataset: run `pip install datasets`") from None

    rows = load_dataset(data.prompts, split=data.prompts_split, revision=data.prompts_revision)
    for number, row in enumerate(rows):
        where = f"{data.prompts} [{data.prompts_split}] row {number}"
        messages = user_turns(row, where)
        if messages:
            name = number if row.get("id") is None else row["id"]
            yield {"id": str(name), "messages": messages}, where


def user_turns(row: dict, where: str) -> list[dict]:
    """The user messages before the first answer; empty when the row holds none or one of them is blank."""
    texts = []
    for role, text in _dialogue(row, where):
        if role in ANSWER_NAMES:
            break
        if role in USER_NAMES:
            texts.append(text)
    if not all(text.strip() for text in texts):
        return []
    return [{"role": "user", "content": text} for text in texts]


def _dialogue(row: dict, where: str) -> list[tuple[str, str]]:
    """(role, text) of each turn, whichever of the three forms the row has."""
    turns, messages, conversations = (row.get(key) for key in ("turns", "messages", "conversations"))
    if isinstance(turns, list) and turns and all(isinstance(text, str) for text in turns):
        return [("user", turns[0])]  # answers separate the turns, so the first turn alone precedes the first answer
    if isinstance(messages, list) and all(map(is_message, messages)):
        return [(message["role"], message["content"]) for message in messages]
    if isinstance(conversations, list) and all(_is_sharegpt(turn) for turn in conversations):
        return [(turn["from"], turn["value"]) for turn in conversations]
    raise ValueError(
        f"{where}: neither `turns` (a list of texts) nor `messages` (role, content) nor `conversations` (from, value) "
        "is there in that form: bring the row into one of them"
    )


def _is_sharegpt(turn: object) -> bool:
    return isinstance(turn, dict) and all(isinstance(turn.get(key), str) for key in ("from", "value"))
