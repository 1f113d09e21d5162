"""Checkpoints that are whole or absent: written aside, sealed, renamed in. Only rank 0 calls what is here."""

import json
import os
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

ASIDE = "unfinished"  # in a stage's folder: what is being written, converted or deleted; swept at the next start
SEAL = "sealed.json"  # every file of a checkpoint and its bytes, so that a cut one is known by name


def write_whole(file: Path, text: str) -> None:
    """Write a file that readers see complete or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(file.name + ".partial")
    partial.write_text(text)
    os.replace(partial, file)


def publish(written: Path, keep: int) -> None:
    """Seal STAGE/unfinished/checkpoint-N, which every rank has finished writing, rename it to STAGE/checkpoint-N and
    keep the newest `keep` whole checkpoints. Torn ones never count, and go too."""
    sizes = {str(file.relative_to(written)): file.stat().st_size for file in written.rglob("*") if file.is_file()}
    write_whole(written / SEAL, json.dumps(sizes, indent=1) + "\n")
    folder = written.parent.parent
    place = folder / written.name
    if place.exists():  # a torn one: a whole one would have been resumed from
        discard(place)
    written.rename(place)
    whole = [path for path in newest_first(folder) if fault(path) is None]
    for path in newest_first(folder):
        if path not in whole[:keep]:
            discard(path)
    with suppress(OSError):  # not empty: left to the next sweep
        written.parent.rmdir()


def discard(checkpoint: Path) -> None:
    """Delete a checkpoint; a kill midway leaves nothing under its name."""
    aside = checkpoint.parent / ASIDE / f"{checkpoint.name}.deleted"
    shutil.rmtree(aside, ignore_errors=True)
    aside.parent.mkdir(exist_ok=True)
    checkpoint.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)


def sweep(folder: Path) -> None:
    """Delete what an interrupted save, conversion or deletion left behind."""
    shutil.rmtree(folder / ASIDE, ignore_errors=True)


def newest_whole(folder: Path) -> Path | None:
    """The newest whole checkpoint of a stage; a torn one is named and passed over."""
    for path in newest_first(folder):
        torn = fault(path)
        if torn is None:
            return path
        print(f"{path} is torn ({torn}): passed over")
    return None


def newest_first(folder: Path) -> list[Path]:
    """The stage's checkpoint folders, whole or not."""
    found = [path for path in folder.glob("checkpoint-*") if path.is_dir() and path.name[11:].isdigit()]
    return sorted(found, key=lambda path: int(path.name[11:]), reverse=True)


def fault(checkpoint: Path) -> str | None:
    """What keeps a checkpoint from being whole, by its seal; None when nothing does."""
    try:
        sizes = json.loads((checkpoint / SEAL).read_text())
    except (OSError, ValueError):
        return f"no readable {SEAL}"
    if not isinstance(sizes, dict) or not sizes:
        return f"no readable {SEAL}"
    for name, size in sizes.items():
        file = checkpoint / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != size:
            return f"{name} has {file.stat().st_size} of {size} bytes"
    return None


def universal(checkpoint: Path, ranks: int) -> bool:
    """Whether the engine must load the checkpoint in DeepSpeed's universal form: ZeRO's shards were written by another
    number of ranks. Converts it, once, beside the shards. Raises ValueError when the conversion fails."""
    shards = list(checkpoint.glob("global_step*/*_optim_states.pt"))
    if len(shards) in (0, ranks):  # none: plain torch or ZeRO-0, which any number of ranks can load
        return False
    source = shards[0].parent
    converted = source.with_name(source.name + "_universal")
    if not converted.is_dir():
        print(
            f"{checkpoint} was written by {len(shards)} rank(s), {ranks} run now: converting it to DeepSpeed's universal form"
        )
        aside = checkpoint.parent / ASIDE / converted.name
        command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
        done = subprocess.run(
            [*command, "--input_folder", str(source), "--output_folder", str(aside)], capture_output=True, text=True
        )
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise ValueError(f"{checkpoint} could not be converted ({reason}): resume it on {len(shards)} ranks")
        aside.rename(converted)
    write_whole(checkpoint / "latest_universal", converted.name)
    return True
