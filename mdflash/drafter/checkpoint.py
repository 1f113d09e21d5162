"""Strict loading of a drafter checkpoint: every required field, key and shape is checked and a fault is named."""

import json
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from .config import MARKOV_HEADS, REQUIRED_FIELDS, MDFlashConfig
from .model import MDFlashModel


def load_drafter(
    path_or_id: str | Path,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    revision: str | None = None,
) -> MDFlashModel:
    """Load a DSpark, DFlash or M-DFlash checkpoint from a folder or a hub id.

    dtype: parameters are converted to it; None keeps the stored one. device: None is the CPU.
    Raises ValueError naming the first faulty field, or every missing, unexpected or wrongly shaped tensor;
    FileNotFoundError when the folder lacks config.json or weights.
    """
    folder = resolve_folder(path_or_id, revision)
    config = read_config(folder)
    model = unfilled(config)
    check_tensors(folder, read_shapes(folder), {key: tuple(tensor.shape) for key, tensor in model.state_dict().items()})
    tensors = {}
    for file in weight_files(folder):
        tensors.update(load_file(file))
    model.load_state_dict(tensors, strict=True, assign=True)
    model.name_or_path = str(path_or_id)
    model.cast(as_dtype(dtype), device).config.dtype = model.dtype
    return model.eval()


def unfilled(config: MDFlashConfig) -> MDFlashModel:
    """A drafter without parameter storage, to be filled by `load_state_dict(.., assign=True)`. RoPE's buffers are real:
    they come from the config, never from a file."""
    with torch.device("meta"):
        model = MDFlashModel(config)
    model.rotary_emb = Qwen3RotaryEmbedding(config=config)
    return model


def as_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """A torch dtype from its name ("bfloat16", "float32", ..); None stays None."""
    if not isinstance(dtype, str):
        return dtype
    found = getattr(torch, dtype, None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ValueError(f"dtype={dtype!r} is not a floating-point torch dtype: use float32, bfloat16 or float16")
    return found


def resolve_folder(path_or_id: str | Path, revision: str | None = None) -> Path:
    """A local folder as it is; anything else is taken as a hub id and downloaded."""
    path = Path(path_or_id)
    if path.is_dir():
        return path
    if path.is_absolute() or str(path_or_id).count("/") != 1 or str(path_or_id).startswith("."):
        raise FileNotFoundError(f"{path_or_id}: no such folder, and not a hub id of the form owner/name")
    try:
        return Path(snapshot_download(str(path_or_id), revision=revision, allow_patterns=["*.json", "*.safetensors"]))
    except Exception as error:
        raise FileNotFoundError(
            f"{path_or_id}: no such folder, and the hub gave {type(error).__name__}; check the name and the network"
        ) from error


def read_config(folder: Path) -> MDFlashConfig:
    """config.json as an MDFlashConfig; what the file itself must name is checked before any default applies."""
    file = folder / "config.json"
    if not file.is_file():
        raise FileNotFoundError(f"{file} is missing: a drafter folder holds config.json and safetensors weights")
    raw = json.loads(file.read_text())
    required = list(REQUIRED_FIELDS)
    if raw.get("markov_rank"):
        required.append("markov_head_type")
    if raw.get("enable_confidence_head"):
        required.append("confidence_head_with_markov")
    missing = [name for name in required if raw.get(name) is None]
    if missing:
        raise ValueError(f"{file} does not set {', '.join(missing)}: a DSpark checkpoint needs them; add them")
    if raw.get("markov_rank") and raw["markov_head_type"] not in MARKOV_HEADS:
        raise ValueError(f"{file}: markov_head_type={raw['markov_head_type']!r}, use one of {', '.join(MARKOV_HEADS)}")
    rope = raw.get("rope_parameters") or {}
    if "rope_theta" not in rope and raw.get("rope_theta") is None:
        raise ValueError(f"{file} sets neither rope_parameters.rope_theta nor rope_theta: RoPE's base must be given")
    return MDFlashConfig.from_dict(raw).validate_contract()


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint, by index when it is sharded."""
    index = folder / "model.safetensors.index.json"
    names = (
        sorted(set(json.loads(index.read_text())["weight_map"].values())) if index.is_file() else ["model.safetensors"]
    )
    files = [folder / name for name in names]
    absent = [file.name for file in files if not file.is_file()]
    if absent:
        raise FileNotFoundError(f"{folder} lacks {', '.join(absent)}: download or export the checkpoint again")
    return files


def read_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of the stored tensors, from the files' headers."""
    shapes = {}
    for file in weight_files(folder):
        with safe_open(file, "pt") as reader:
            shapes.update({key: tuple(reader.get_slice(key).get_shape()) for key in reader.keys()})  # noqa: SIM118
    return shapes


def check_tensors(folder: Path, stored: dict, expected: dict) -> None:
    """Compare names and shapes; one ValueError lists every difference."""
    faults = [f"missing {key} {list(expected[key])}" for key in sorted(expected.keys() - stored.keys())]
    faults += [f"unexpected {key} {list(stored[key])}" for key in sorted(stored.keys() - expected.keys())]
    faults += [
        f"{key} is {list(stored[key])}, the config asks for {list(expected[key])}"
        for key in sorted(stored.keys() & expected.keys())
        if stored[key] != expected[key]
    ]
    if faults:
        raise ValueError(
            f"{folder} does not hold the drafter its config.json describes: {'; '.join(faults)}. "
            "Fix the config or export the weights again"
        )


def save_drafter(folder: str | Path, config: MDFlashConfig, state: dict[str, torch.Tensor]) -> None:
    """Write a complete drafter state under the contract: config.json and model.safetensors, renamed into place.

    Raises ValueError naming every missing, unexpected or wrongly shaped tensor, before anything is written.
    """
    folder = Path(folder)
    expected = {key: tuple(tensor.shape) for key, tensor in unfilled(config).state_dict().items()}
    check_tensors(folder, {key: tuple(tensor.shape) for key, tensor in state.items()}, expected)
    folder.mkdir(parents=True, exist_ok=True)
    config.architectures = config.architectures or ["Qwen3DSparkModel"]
    config.save_pretrained(folder)
    partial = folder / "model.safetensors.partial"
    stored = {key: tensor.detach().cpu().contiguous() for key, tensor in state.items()}
    if stored["lm_head.weight"].data_ptr() == stored["embed_tokens.weight"].data_ptr():
        stored["lm_head.weight"] = stored["lm_head.weight"].clone()  # a tied target still yields both tensors
    save_file(stored, partial, {"format": "pt"})
    partial.chmod(0o644)
    partial.replace(folder / "model.safetensors")
