"""How decoding is laid out: the settings that change its speed, and which device holds what."""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..drafter import MDFlashModel
from ..target import Target
from ..target.target import share_weights
from .remote import parse_address

AUTO = "auto"
ALL_LOGITS_ROWS = 448  # tree rows up to which the LM head over all of them hides behind the verify pass (lm_head: auto)


@dataclass(frozen=True)
class Deployment:
    """Settings of decoding that change its speed, never its tokens.

    runner: "eager" (the Hugging Face model, the reference), "fast" (fused weights, kernels, and CUDA graphs unless `graphs`
    is off), or "auto": fast on GPUs for models that it fits. lm_head: DPara's LM head over "all" branches in precompute,
    over the "selected" one after the verify pass, or "auto" by their number. head_device: the heads work on the "drafter"'s
    device or the "target"'s. timeout_s: how long a round may take. lag: rounds that may be under way before the host looks
    at an outcome (None: 1 on GPUs, 0 on CPUs). drafter_address: HOST:PORT at which a drafter process (`mdflash serve`) meets
    this one, as DPara's drafting side; None keeps it in this process. tap_events: record an event behind every tapped layer of
    a fast verify pass (see FastTargetRunner).
    in_flight_taps, bonus_guesses: DPara starts precompute behind so many of the verify pass's taps, with their features of the
    block's tokens, and guesses so many bonuses for every acceptance boundary; they change which drafts are made, never
    the answer's distribution. "auto" measures them at start-up (tuning.py). guess_source: the guesses are the "spine"'s own
    predictions (a pass before the tree), or the last "draft"'s alternatives (no pass; none for r = d).
    """

    runner: str = "auto"
    lm_head: str = "auto"
    head_device: str = "drafter"
    timeout_s: float = 120.0
    graphs: bool = True
    lag: int | None = None
    drafter_address: str | None = None
    tap_events: bool = False
    in_flight_taps: int | str = 0
    bonus_guesses: int | str = 0
    guess_source: str = "spine"

    def __post_init__(self):
        choices = {
            "runner": ("auto", "eager", "fast"),
            "lm_head": ("all", "selected", "auto"),
            "head_device": ("drafter", "target"),
            "guess_source": ("spine", "draft"),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)!r}: use one of {', '.join(allowed)}")
        if self.head_device == "target" and self.lm_head == "all":
            raise ValueError("lm_head='all' with head_device='target': only the branch taken has its logits made there; use "
                             "'selected' or 'auto'")  # fmt: skip
        if not isinstance(self.timeout_s, int | float) or not 0 < self.timeout_s < math.inf:
            raise ValueError(f"drafter_timeout_s={self.timeout_s!r}: use a positive number of seconds")
        for name in ("in_flight_taps", "bonus_guesses"):
            value = getattr(self, name)
            if value != AUTO and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
                raise ValueError(f"{name}={value!r}: use 0 for none, a positive integer, or 'auto'")
        if self.drafter_address is not None and AUTO in (self.in_flight_taps, self.bonus_guesses):
            raise ValueError(
                f"drafter_address={self.drafter_address!r}: 'auto' does not measure over it; state both settings"
            )
        if self.drafter_address is not None:
            parse_address(self.drafter_address)

    def rounds_ahead(self, device: torch.device) -> int:
        """The lag on this device."""
        return int(device.type == "cuda") if self.lag is None else self.lag

    def all_logits(self, rows: int) -> bool:
        """Whether a tree of so many slots over the batch ends in the LM head over them all."""
        if self.lm_head == "auto":
            return self.head_device == "drafter" and not self.bonus_guesses and rows <= ALL_LOGITS_ROWS
        return self.lm_head == "all"


def default_devices() -> str:
    """Target's and drafter's device of this machine: two GPUs, the one GPU twice, or the CPU."""
    gpus = torch.cuda.device_count()
    return f"cuda:0,cuda:{min(gpus, 2) - 1}" if gpus else "cpu,cpu"


def usable_device(name: str) -> torch.device:
    """A device of this machine, or ValueError saying what there is."""
    try:
        device = torch.device(name.strip())
    except RuntimeError as error:
        raise ValueError(f"device {name!r} is not a torch device: use cpu or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device {name!r}: decoding runs on cpu or cuda:N")
    count = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        raise ValueError(f"device {name!r}: this machine has {count} CUDA devices; use {default_devices()!r}")
    return device


def share_cores(devices: str) -> None:
    """On CPUs give each role half of the cores, so that DPara's two threads do not wait for each other; the same for every
    method, so that speeds compare."""
    if "cpu" in devices:
        torch.set_num_threads(max(1, (os.cpu_count() or 2) // 2))


def place(target: Target, drafter: MDFlashModel | None, method: str, devices: str | Sequence[str] | None) -> None:
    """Move target and drafter to `devices` and share embeddings and LM head where they live together."""
    if devices is not None:
        names = devices.split(",") if isinstance(devices, str) else list(devices)
        if len(names) not in (1, 2):
            raise ValueError(f"devices={devices!r}: name the target's and the drafter's device, as in 'cuda:0,cuda:1'")
        first, last = usable_device(names[0]), usable_device(names[-1])
        if target.device != first:
            target.model.to(first)
        if drafter is not None:
            drafter.to(last)
    if drafter is None:
        return
    if method != "dpara":
        drafter.to(target.device)
    share_weights(target, drafter)
