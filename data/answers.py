"""Let the target answer the prompts: the conversations that drafters are trained on.

    python -m data.answers --config recipes/NAME.yaml [--key value]

Writes runs/NAME/answers/answers.jsonl, one row for each prompt and temperature, and manifest.json beside it. Run it
again after an interruption: what is there stays, and the rest is answered in the same batches with the same seeds.
"""

import hashlib
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from tqdm import tqdm
from transformers import AutoConfig, GenerationConfig
from transformers.utils import cached_file

from mdflash.chat import Chat
from mdflash.conversations import load_chat, read_conversations
from mdflash.recipe import DataSection, Recipe, TargetSection, read_recipe
from mdflash.target import Target, grouped_attention, load_target

from .prompts import read_prompts

BATCHES_PER_CHUNK = 32  # prompts are sorted by length within chunks of this many batches
WEIGHT_FILES = ("*.safetensors", "*.bin")


@dataclass(frozen=True)
class Job:
    """One answer to write. id: "<prompt id>@t<temperature>"; ids: the prompt's tokens."""

    id: str
    messages: list[dict]
    ids: list[int]


@dataclass(frozen=True)
class Answer:
    """content: the text without its stop token. finish_reason: "stop" or "length". tokens: how many were generated."""

    content: str
    finish_reason: str
    tokens: int


def write_answers(recipe: Recipe) -> dict:
    """Answer whatever is still unanswered; returns the finished manifest.

    Raises ValueError when the folder holds answers made with other parameters, FileNotFoundError without prompts.
    """
    data, file = recipe.data, recipe.answers_file
    chat = load_chat(recipe.target)
    prompts = read_prompts(data)
    manifest = open_manifest(recipe, chat, prompts)
    if manifest["complete"]:
        print(f"{file} is complete: {manifest['counts']['answers']} answers")
        return manifest
    file.parent.mkdir(parents=True, exist_ok=True)
    write_manifest(file, manifest)
    drop_torn_line(file)
    done = {row["id"] for row in read_conversations(file)} if file.exists() else set()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    gguf = {"gguf_file": recipe.target.gguf_file} if recipe.target.gguf_file else {}
    target = load_target(recipe.target.path, recipe.target.dtype, device, recipe.target.revision, **gguf)
    too_long = set()
    with (
        file.open("a", encoding="utf-8") as out,
        tqdm(total=len(prompts) * len(data.temperatures), initial=len(done), unit="answer", desc="answers") as progress,
    ):
        for temperature, batch in plan(prompts, data, chat, done, position_limit(target, data), too_long):
            began = time.perf_counter()
            answers = generate(target, chat, batch, temperature, data)
            for job, answer in zip(batch, answers, strict=True):
                if job.id in done:
                    continue
                if answer.content.strip():
                    reply = {"role": "assistant", "content": answer.content, "finish_reason": answer.finish_reason}
                    out.write(json.dumps({"id": job.id, "messages": [*job.messages, reply]}, ensure_ascii=False) + "\n")
                progress.update()
            out.flush()
            tokens = sum(answer.tokens for answer in answers)
            progress.set_postfix_str(f"{tokens / (time.perf_counter() - began):.0f} tokens/s")
    return close_manifest(file, manifest, len(prompts) * len(data.temperatures), len(too_long))


def plan(
    prompts: Sequence[dict], data: DataSection, chat: Chat, done: set[str], longest: int | None, too_long: set[str]
) -> Iterator[tuple[float, list[Job]]]:
    """The batches still to answer, with their temperature. A batch depends on the prompts alone, never on what is done:
    one that was interrupted is answered as it would have been. Ids of prompts over `longest` tokens join `too_long`."""
    chunk = BATCHES_PER_CHUNK * data.batch_size
    for temperature in data.temperatures:
        for at in range(0, len(prompts), chunk):
            part = [(answer_id(prompt, temperature), prompt) for prompt in prompts[at : at + chunk]]
            if all(name in done for name, _ in part):
                continue
            jobs = [Job(name, prompt["messages"], chat.prompt(prompt["messages"])) for name, prompt in part]
            too_long |= {job.id for job in jobs if longest and len(job.ids) > longest}
            jobs = sorted((job for job in jobs if job.id not in too_long), key=lambda job: len(job.ids))
            for first in range(0, len(jobs), data.batch_size):
                batch = jobs[first : first + data.batch_size]
                if not all(job.id in done for job in batch):
                    yield temperature, batch


def answer_id(prompt: dict, temperature: float) -> str:
    """The id of a prompt's answer at a temperature."""
    return f"{prompt['id']}@t{temperature:g}"


def position_limit(target: Target, data: DataSection) -> int | None:
    """Tokens a prompt may have so that its answer still fits the target's positions; None without a limit."""
    positions = getattr(target.config, "max_position_embeddings", None)
    if positions and positions <= data.max_new_tokens:
        raise ValueError(
            f"data.max_new_tokens={data.max_new_tokens}: lower it below the target's {positions} positions"
        )
    return positions and positions - data.max_new_tokens


@torch.inference_mode()
def generate(target: Target, chat: Chat, batch: Sequence[Job], temperature: float, data: DataSection) -> list[Answer]:
    """Answer a batch (padded on the left). Temperature 0 is greedy; any other samples from the whole distribution."""
    pad = chat.tokenizer.pad_token_id
    pad = chat.stop_ids[0] if pad is None else pad
    width = max(len(job.ids) for job in batch)
    ids_BN = torch.tensor([[pad] * (width - len(job.ids)) + job.ids for job in batch], device=target.device)
    mask_BN = torch.tensor([[0] * (width - len(job.ids)) + [1] * len(job.ids) for job in batch], device=target.device)
    sampling = {"temperature": temperature, "top_p": 1.0, "top_k": 0} if temperature else {}
    settings = GenerationConfig(
        max_new_tokens=data.max_new_tokens,
        do_sample=bool(temperature),
        eos_token_id=list(chat.stop_ids),
        pad_token_id=pad,
        **sampling,
    )
    target.model.generation_config = settings  # transformers would fill every gap with the model's own defaults
    torch.manual_seed(batch_seed(batch, data.seed))  # `generate` samples from the global generator
    with grouped_attention(target.model):
        out_BN = target.model.generate(ids_BN, attention_mask=mask_BN, generation_config=settings)
    return [to_answer(chat, tokens) for tokens in out_BN[:, width:].tolist()]


def batch_seed(batch: Sequence[Job], seed: int) -> int:
    """A 63-bit seed from the run's seed and the ids in the batch."""
    names = "\n".join([str(seed), *(job.id for job in batch)])
    return int.from_bytes(hashlib.sha256(names.encode()).digest()[:8], "big") >> 1


def to_answer(chat: Chat, tokens: list[int]) -> Answer:
    """Text up to the first stop token; without one the answer was cut at its length."""
    length = next((at for at, token in enumerate(tokens) if token in chat.stop_ids), None)
    kept = tokens[:length]
    text = chat.tokenizer.decode(kept, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    if length is None:  # the cut may fall inside a character
        return Answer(text.rstrip("\ufffd"), "length", len(kept))
    return Answer(text, "stop", len(kept) + 1)


def drop_torn_line(file: Path) -> None:
    """Cut off a last line that an interruption left without its end."""
    if file.exists():
        with file.open("rb+") as stream:
            whole = stream.read().rfind(b"\n") + 1
            stream.truncate(whole)


def open_manifest(recipe: Recipe, chat: Chat, prompts: Sequence[dict]) -> dict:
    """The manifest to work under: the one beside the answers when it states the parameters of now, else a new one."""
    file, parameters = recipe.answers_file, parameters_of(recipe, chat, prompts)
    path = manifest_path(file)
    remedy = f"delete {file.parent} or give the recipe another name"
    if not path.exists():
        if file.exists():
            raise ValueError(f"{file} has no manifest.json that says how it was made: {remedy}")
        source = {"target": recipe.target.path, "revision": recipe.target.revision, "prompts": recipe.data.prompts}
        source["prompts_revision"] = recipe.data.prompts_revision
        manifest = {"complete": False, "parameters": parameters, "source": source, "batch_sizes": []}
    else:
        manifest = json.loads(path.read_text())
        changed = differences(manifest["parameters"], parameters)
        if changed:
            raise ValueError(f"{file.parent} holds answers made with other parameters ({'; '.join(changed)}): {remedy}")
        if manifest["complete"] and (not file.exists() or sha256_of(file) != manifest["answers_sha256"]):
            raise ValueError(f"{file} is not the file that its manifest describes: {remedy}")
    if recipe.data.batch_size not in manifest["batch_sizes"] and not manifest["complete"]:
        manifest["batch_sizes"].append(recipe.data.batch_size)
    return manifest


def close_manifest(file: Path, manifest: dict, jobs: int, too_long: int) -> dict:
    """Count and hash the finished file, and mark the manifest complete."""
    rows = read_conversations(file)
    if not rows:
        raise ValueError(f"all {jobs} answers are empty or their prompts too long: check the target and its template")
    finished = sum(row["messages"][-1]["finish_reason"] == "stop" for row in rows)
    counts = {
        "prompts": jobs // len(manifest["parameters"]["temperatures"]),
        "answers": len(rows),
        "finished": finished,
        "cut": len(rows) - finished,
        "empty": jobs - too_long - len(rows),
        "too_long": too_long,
    }
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    manifest |= {"complete": True, "counts": counts, "answers_sha256": sha256_of(file), "versions": versions}
    write_manifest(file, manifest)
    print(f"{file}: " + ", ".join(f"{count} {name}" for name, count in counts.items()))
    return manifest


def parameters_of(recipe: Recipe, chat: Chat, prompts: Sequence[dict]) -> dict:
    """Everything that decides the answers; the batch size is left out, so that it can be lowered half-way."""
    data = recipe.data
    names = [f"{temperature:g}" for temperature in data.temperatures]
    if len(set(names)) < len(names) or min(data.temperatures) < 0:
        raise ValueError(f"data.temperatures={data.temperatures}: name distinct temperatures, none of them negative")
    rows = "".join(json.dumps(prompt, sort_keys=True) + "\n" for prompt in prompts)
    return {
        **target_identity(recipe.target),
        "dtype": recipe.target.dtype,
        "chat_template_sha256": chat.template_hash,
        "thinking": recipe.target.thinking,
        "stop_ids": list(chat.stop_ids),
        "prompts_sha256": hashlib.sha256(rows.encode()).hexdigest(),
        "temperatures": data.temperatures,
        "top_p": 1.0,
        "top_k": 0,
        "max_new_tokens": data.max_new_tokens,
        "seed": data.seed,
    }


def target_identity(target: TargetSection) -> dict:
    """Which target this is, wherever it lies: its config.json, and its weights by content or by hub commit."""
    folder = Path(target.path)
    identity = {"gguf_file": target.gguf_file, "config_sha256": None, "weights_sha256": None, "commit": None}
    config = cached_file(
        target.path, "config.json", revision=target.revision, _raise_exceptions_for_missing_entries=False
    )
    if config:
        identity["config_sha256"] = sha256_of(Path(config))
    if folder.is_dir():
        patterns = [target.gguf_file] if target.gguf_file else WEIGHT_FILES
        files = sorted(file for pattern in patterns for file in folder.glob(pattern))
        names = "".join(f"{file.name} {sha256_of(file)}\n" for file in files)
        identity["weights_sha256"] = hashlib.sha256(names.encode()).hexdigest()
    else:
        gguf = {"gguf_file": target.gguf_file} if target.gguf_file else {}
        identity["commit"] = AutoConfig.from_pretrained(target.path, revision=target.revision, **gguf)._commit_hash
    return identity


def differences(before: dict, now: dict) -> list[str]:
    """One line for each parameter that changed."""
    names = sorted(before.keys() | now.keys())
    return [f"{name} was {before.get(name)}, is {now.get(name)}" for name in names if before.get(name) != now.get(name)]


def manifest_path(file: Path) -> Path:
    """manifest.json beside the answers."""
    return file.with_name("manifest.json")


def write_manifest(file: Path, manifest: dict) -> None:
    """Write the manifest whole or not at all."""
    path = manifest_path(file)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(manifest, indent=2) + "\n")
    os.replace(partial, path)


def sha256_of(file: Path) -> str:
    """sha256 of a file's content."""
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def main(args: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    recipe, _ = read_recipe(args, "Let the target answer the prompts: training conversations for its drafter.")
    try:
        write_answers(recipe)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
