"""Dequantise a GGUF model into an ordinary Hugging Face folder: `python recipes/gguf_to_safetensors.py FILE.gguf FOLDER`.

A GGUF file holds quantised weights, so the result is a slightly different model from the hub's: its sha256 is recorded.
"""

import hashlib
import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def convert(file: Path, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write model, tokenizer and source.json (file name, sha256); nothing happens when that source.json is there."""
    source = {"file": file.name, "sha256": hashlib.sha256(file.read_bytes()).hexdigest()}
    record = folder / "source.json"
    if record.is_file() and json.loads(record.read_text()) == source:
        print(f"{folder} already holds {file.name}")
        return
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    plain = AutoModelForCausalLM.from_config(model.config, dtype=torch.float32)
    state = {name: tensor for name, tensor in model.state_dict().items() if tensor.is_floating_point()}
    missing = plain.load_state_dict(state, strict=False).missing_keys
    if set(missing) - {"lm_head.weight"}:
        raise ValueError(f"{file} was not fully dequantised, these tensors are missing: {', '.join(missing)}")
    plain.tie_weights()
    for config in (plain.config, model.config):
        if hasattr(config, "quantization_config"):
            del config.quantization_config
    plain.to(dtype).save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)
    record.write_text(json.dumps(source, indent=2) + "\n")
    print(f"{folder}: {file.name} dequantised to {dtype}")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
