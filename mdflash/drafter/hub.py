"""A finished drafter as a folder to publish (weights, config.json, model card), and its upload to the hub."""

import json
import os
import re
from pathlib import Path

import torch
import yaml
from huggingface_hub import HfApi, ModelCard, ModelCardData, get_token
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from ..recipe import BEYOND
from .checkpoint import load_drafter, save_drafter, weight_files
from .model import MDFlashModel

INDEX = "model.safetensors.index.json"
BULKY = ("loss_curve", "frozen_sha256")  # entries of training.json that a model card does not repeat
TRAINING_FILES = ("*.pt", "*.pth", "*.bin", "*.ckpt", "*.partial", "latest", "trainer_state.json")


class PushError(OSError):
    """The hub refused or was not reached; the message holds no token."""


def export(
    checkpoint_dir: str | Path, output_dir: str | Path, summary: str | Path | None = None, license: str = "apache-2.0"
) -> Path:
    """Write a checkpoint as a folder that can be published: safetensors, config.json and README.md. Returns the folder.

    summary: the summary.json of an evaluation, for the card's table. Raises ValueError for a checkpoint that breaks the
    contract or holds a value that is not finite, FileNotFoundError for a missing file; then nothing is written.
    """
    source, output = Path(checkpoint_dir), Path(output_dir)
    if not source.is_dir():
        raise FileNotFoundError(f"{source}: no such folder; train a drafter first or name its folder")
    if source.resolve() == output.resolve():
        raise ValueError(f"output_dir={output_dir!s} is the checkpoint itself: name another folder")
    drafter = load_drafter(source)
    check_finite(drafter)
    training = read_json(source / "training.json") if (source / "training.json").is_file() else {}
    card = model_card(drafter, training, read_json(Path(summary)) if summary else {}, license)

    save_drafter(output, drafter.config, drafter.state_dict())
    written = load_drafter(output).state_dict()
    changed = [name for name, tensor in drafter.state_dict().items() if not torch.equal(tensor, written[name])]
    if changed:
        raise ValueError(f"{output} does not give back {', '.join(changed)}: delete the folder and export again")
    (output / "README.md").write_text(str(card), encoding="utf-8")
    return output


def push(
    folder: str | Path, repo_id: str, private: bool = False, dry_run: bool = False, revision: str | None = None
) -> str | None:
    """Upload an exported folder to `repo_id` (made when it is missing); returns the commit's address.

    dry_run: validate, list what would be uploaded and stop, without network or token. revision: a branch, made when it
    is missing. Raises ValueError for a bad repo id or a folder that is no export, PushError when the upload fails.
    """
    check_repo_id(repo_id)
    files = files_to_push(Path(folder))
    check_finite(load_drafter(folder))
    where = f"{repo_id}{f' at {revision}' if revision else ''} ({'private' if private else 'public'})"
    print(f"{'would upload' if dry_run else 'uploading'} to {where}:")
    for file in files:
        print(f"  {file.name}  {readable_size(file.stat().st_size)}")
    if dry_run:
        return None
    try:
        api = HfApi()
        api.create_repo(repo_id, private=private, exist_ok=True)
        if revision:
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        names = [file.name for file in files]
        commit = api.upload_folder(repo_id=repo_id, folder_path=folder, revision=revision, allow_patterns=names)
    except Exception as error:
        raise PushError(
            f"upload to {repo_id} failed: {type(error).__name__}: {without_tokens(str(error))}; check the network and "
            "that `hf auth login` or HF_TOKEN gives a token that may write there, then push again"
        ) from None
    return str(commit.commit_url)


def files_to_push(folder: Path) -> list[Path]:
    """The files of an export that belong on the hub. Raises ValueError when training state lies among them."""
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such folder; make it with `mdflash export`")
    strange = sorted({file.name for pattern in TRAINING_FILES for file in folder.glob(pattern)})
    strange += sorted(f"{part.name}/" for part in folder.iterdir() if part.is_dir() and not part.name.startswith("."))
    if strange:
        raise ValueError(
            f"{folder} holds training state ({', '.join(strange)}): push a folder that `mdflash export` made"
        )
    index = [folder / INDEX] if (folder / INDEX).is_file() else []
    files = [folder / "README.md", folder / "config.json", *index, *weight_files(folder)]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise FileNotFoundError(f"{folder} lacks {', '.join(missing)}: make it with `mdflash export`")
    return files


def check_repo_id(repo_id: str) -> None:
    """Raise ValueError unless repo_id has the form owner/name that the hub accepts."""
    try:
        validate_repo_id(repo_id)
        valid = repo_id.count("/") == 1
    except HFValidationError:
        valid = False
    if not valid:
        raise ValueError(f"repo_id={repo_id!r}: use owner/name, of letters, digits, '-', '_' and '.'")


def check_finite(drafter: MDFlashModel) -> None:
    """Raise ValueError naming the tensors that hold NaN or infinity."""
    faults = [name for name, tensor in drafter.state_dict().items() if not tensor.isfinite().all()]
    if faults:
        raise ValueError(
            f"{drafter.name_or_path} holds NaN or infinity in {', '.join(faults)}: use an earlier checkpoint"
        )


def without_tokens(text: str) -> str:
    """Text with every hub token blotted out."""
    for secret in (os.environ.get("HF_TOKEN"), get_token()):
        if secret:
            text = text.replace(secret, "[token]")
    return re.sub(r"hf_[A-Za-z0-9]+", "[token]", text)


def readable_size(size: int) -> str:
    """12.3 MB for a number of bytes."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= scale:
            return f"{size / scale:.1f} {unit}"
    return f"{size} B"


def model_card(drafter: MDFlashModel, training: dict, summary: dict, license: str = "apache-2.0") -> ModelCard:
    """README.md of an exported drafter. training: the trainer's record; summary: an evaluation's, or empty."""
    config = drafter.config
    block = config.mdflash_config or {}
    recipe = training.get("recipe") or {}
    target = block.get("target") or (recipe.get("target") or {}).get("path")
    prompts = (recipe.get("data") or {}).get("prompts")
    serial = ("DSpark", "dspark") if config.markov_rank else ("DFlash", "dflash")
    kind, method = ("M-DFlash", "dpara") if block and block.get("anchor_counts") != [0] else serial
    metadata = ModelCardData(
        base_model=target if is_hub_id(target) else None,
        datasets=[prompts] if is_hub_id(prompts) else None,
        library_name="mdflash",
        license=license,
        pipeline_tag="text-generation",
        tags=["speculative-decoding", "drafter", kind.lower()],
    )
    sections = [
        f"---\n{metadata.to_yaml()}\n---",
        f"# {kind} drafter for {shown(target) or 'its target'}",
        introduction(drafter, method),
        provenance(block, target, recipe),
        how_to_load(target, block, method, str(config.dtype or "bfloat16").removeprefix("torch.")),
        results(summary) if summary else "",
        training_record(training) if training else "",
    ]
    return ModelCard("\n\n".join(section for section in sections if section) + "\n")


def introduction(drafter: MDFlashModel, method: str) -> str:
    """What the checkpoint is and who can read it."""
    config, rank = drafter.config, drafter.config.markov_rank
    head = f"a {config.markov_head_type} Markov head of rank {rank}" if rank else "no Markov head"
    text = (
        f"A speculative decoding drafter: {config.num_hidden_layers} layers of width {config.hidden_size}, drafts of "
        f"{config.block_size} tokens, {head}. It reads the outputs of layers {list(config.target_layer_ids)} of a "
        f"target with {config.num_target_layers} layers.\n\n"
        "Tensors and configuration follow the DSpark checkpoint contract, so engines that read DSpark drafters load it "
        "unchanged."
    )
    if method == "dpara":
        text += (
            " What M-DFlash adds is one block of config.json, `mdflash_config`, which they can ignore. The weights "
            "were finetuned to draft while the target verifies (DPara); used serially they need not reach the "
            "acceptance length of the DSpark drafter they come from."
        )
    return text


def provenance(block: dict, target: str | None, recipe: dict) -> str:
    """Base models and data, as a table."""
    source = recipe.get("drafter") or {}
    revision = block.get("target_revision") or (recipe.get("target") or {}).get("revision")
    thinking = block.get("thinking", (recipe.get("target") or {}).get("thinking"))
    facts = {
        "base model (target)": shown(target),
        "revision of the base model": revision or "not pinned",
        "base DSpark drafter": shown(block.get("base_checkpoint") or source.get("base")),
        "revision of the base drafter": block.get("base_revision") or source.get("base_revision"),
        "anchor counts trained": block.get("anchor_counts"),
        "beyond the paper": ", ".join(f"{name}: {value}" for name, value in beyond(block).items()) or None,
        "training answers (sha256)": block.get("data_sha256"),
        "chat template (sha256)": block.get("chat_template_sha256"),
        "thinking": None if thinking is None else ("on" if thinking else "off"),
    }
    return "## Origin\n\n" + table(["", ""], [[name, str(fact)] for name, fact in facts.items() if fact is not None])


def beyond(block: dict) -> dict:
    """What the finetune had switched on that the paper's has not."""
    return {name: value for name, value in block.get("beyond_the_paper", {}).items() if value != BEYOND.get(name)}


def how_to_load(target: str | None, block: dict, method: str, dtype: str) -> str:
    """A program that loads target and drafter and decodes, early and with guesses where it was trained for them."""
    early = {"in_flight_taps": "in_flight_taps", "known_bonus": "bonus_guesses"}
    settings = "".join(f', {setting}="auto"' for name, setting in early.items() if name in beyond(block))
    revision = f', revision="{block["target_revision"]}"' if block.get("target_revision") else ""
    return f"""## Use

```python
import mdflash

target = mdflash.load_target("{shown(target) or "TARGET"}", dtype="{dtype}"{revision})
drafter = mdflash.load_drafter("THIS_REPOSITORY", dtype="{dtype}")
devices = "cuda:0,cuda:1"  # target's and drafter's; "cuda:0,cuda:0" with one GPU, "cpu,cpu" without
(answer,) = mdflash.decode(
    target, drafter, ["Why is the sky blue?"], method="{method}", devices=devices{settings}
)
print(target.tokenizer.decode(answer.token_ids), answer.tau)
```"""


def results(summary: dict) -> str:
    """Acceptance lengths of an evaluation with their intervals, and how it was made."""
    methods = summary["methods"]
    names = list(dict.fromkeys(name for figures in methods.values() for name in figures["benchmarks"]))
    rows = []
    for method, figures in methods.items():
        chosen = [figures["benchmarks"].get(name, {}) for name in names] + [figures["average"]]
        macro = interval(figures["average"].get("tau_macro"), figures["average"].get("tau_macro_ci95"))
        rows.append([method, *(interval(each.get("tau_pooled"), each.get("tau_ci95")) for each in chosen), macro])
    lines = [
        "## Acceptance length",
        "τ: tokens committed per target verification, bonus included [95% interval].",
        table(["method", *names, "pooled", "macro"], rows),
        "\n".join(
            f"- {name.replace('_', ' ')}: {interval(ratio['value'], ratio['ci95'], 3)}"
            for name, ratio in (summary.get("ratios") or {}).items()
            if ratio
        ),
        f"Measured by `{shown(summary.get('command'))}`, code revision {summary.get('revision')}, "
        + ", ".join(f"{name} {version}" for name, version in (summary.get("versions") or {}).items())
        + "; devices: "
        + ", ".join(f"{role} {device_text(device)}" for role, device in (summary.get("devices") or {}).items())
        + ".",
    ]
    return "\n\n".join(line for line in lines if line)


def training_record(training: dict) -> str:
    """The trainer's own record, without its long lists."""
    record = {name: value for name, value in training.items() if name not in BULKY}
    return "## Training\n\n```yaml\n" + yaml.safe_dump(shown(record), sort_keys=False, allow_unicode=True) + "```"


def table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def interval(value: float | None, ci95: list[float] | None, digits: int = 2) -> str:
    """3.46 [3.41, 3.52], or a dash without a value."""
    if value is None:
        return "-"
    return f"{value:.{digits}f}" + (f" [{ci95[0]:.{digits}f}, {ci95[1]:.{digits}f}]" if ci95 else "")


def device_text(device: dict | str) -> str:
    """A device's place and hardware name."""
    return f"{device['device']} ({device['name']})" if isinstance(device, dict) else str(device)


def shown(value):
    """A value as a public card shows it: of a path that only one machine knows, the last name."""
    if isinstance(value, dict):
        return {key: shown(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [shown(item) for item in value]
    return Path(value).name if isinstance(value, str) and Path(value).is_absolute() else value


def is_hub_id(name: str | None) -> bool:
    """Whether name can be a hub id rather than a local folder or file."""
    if not name or name.count("/") != 1 or Path(name).exists():
        return False
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def read_json(file: Path) -> dict:
    """A JSON object from a file."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{file} is not JSON ({error}): write it again") from None
