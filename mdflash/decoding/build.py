"""From a target, a drafter and settings to a schedule: which device holds what, which runners serve."""

import math
import os
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass

import torch
from torch import nn

from ..drafter import MDFlashModel
from ..drafter.sampling import Sampling
from ..target import Target
from ..target.target import share_weights
from .autoregressive import Autoregressive
from .dpara import DPara
from .drafter_runner import DrafterRunner
from .drafting_side import DraftingSide
from .fast import FastDrafterRunner, FastHeadRunner, FastTargetRunner, why_not_fast, why_not_fast_drafter
from .head_runner import HeadRunner
from .link import Here, make_link
from .remote import connect, parse_address, remote_side
from .schedule import Noise, Schedule
from .serial import Serial
from .target_runner import TargetRunner

METHODS = ("autoregressive", "dspark", "dflash", "dpara")
RUNNERS = {
    "eager": (TargetRunner, DrafterRunner, HeadRunner),
    "fast": (FastTargetRunner, FastDrafterRunner, FastHeadRunner),
}


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
    """

    runner: str = "auto"
    lm_head: str = "auto"
    head_device: str = "drafter"
    timeout_s: float = 120.0
    graphs: bool = True
    lag: int | None = None
    drafter_address: str | None = None
    tap_events: bool = False

    def __post_init__(self):
        choices = {
            "runner": ("auto", *RUNNERS),
            "lm_head": ("all", "selected", "auto"),
            "head_device": ("drafter", "target"),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)!r}: use one of {', '.join(allowed)}")
        if self.head_device == "target" and self.lm_head == "all":
            raise ValueError("lm_head='all' with head_device='target': only the branch taken has its logits made there; use "
                             "'selected' or 'auto'")  # fmt: skip

        if not isinstance(self.timeout_s, int | float) or not 0 < self.timeout_s < math.inf:
            raise ValueError(f"drafter_timeout_s={self.timeout_s!r}: use a positive number of seconds")
        if self.drafter_address is not None:
            parse_address(self.drafter_address)

    def rounds_ahead(self, device: torch.device) -> int:
        """The lag on this device."""
        return int(device.type == "cuda") if self.lag is None else self.lag

    def all_logits(self, rows: int) -> bool:
        """Whether a tree of so many slots over the batch ends in the LM head over them all."""
        if self.lm_head == "auto":
            return self.head_device == "drafter" and rows <= ALL_LOGITS_ROWS
        return self.lm_head == "all"


def build_schedule(
    method: str, target: Target, drafter: MDFlashModel | None, sampling: Sampling, batch: int, tokens: int,
    deployment: Deployment,
) -> Schedule:  # fmt: skip
    """Runners with caches large enough for requests of `tokens` (prompt and answer) in each of `batch` rows, and the
    schedule over them."""
    d, lag = drafter.draft_length if drafter is not None else 0, deployment.rounds_ahead(target.device)
    slots = tokens + (1 + lag) * (d + 1)
    taps = tuple(drafter.config.target_layer_ids) if drafter is not None else ()
    runner = chosen_runner(deployment.runner, target, drafter)
    extra = {"graphs": deployment.graphs} if runner == "fast" else {}
    events = {"tap_events": deployment.tap_events} if extra else {}
    target_runner = RUNNERS[runner][0](target, taps, sampling, batch, slots, **extra, **events)
    noise = Noise(batch, tokens + lag, d, target.device, sampling.greedy)
    if drafter is None:
        return Autoregressive(target_runner, noise)
    settings = {
        "runner": runner, "batch": batch, "slots": slots, "all_logits": deployment.all_logits(batch * (d + 1) * d),
        "graphs": deployment.graphs,
    }  # fmt: skip
    if method != "dpara":
        side = build_side(drafter, sampling, **settings)
        return Serial(target_runner, side.drafter, side.head, noise)
    beside = deployment.head_device == "target"
    settings["backbone_only"] = beside
    if deployment.drafter_address is not None:
        channel = connect(deployment.drafter_address, target.device, deployment.timeout_s)
        link, there = remote_side(channel, drafter, sampling, **settings), None
    else:
        side, there = build_side(drafter, sampling, **settings), drafter.norm.weight.device
        link = make_link(side, target.device, there, deployment.timeout_s)
    if not beside:
        return DPara(target_runner, d, noise, link)
    near = there == target.device
    heads = (drafter.lm_head, drafter.head) if near else heads_for(target, drafter)
    head_runner = RUNNERS[runner][2](*heads, sampling, **(extra | {"near": near} if extra else {}))
    return DPara(target_runner, d, noise, link, Here(DraftingSide(None, head_runner)))


def build_side(
    drafter: MDFlashModel, sampling: Sampling, runner: str, batch: int, slots: int, all_logits: bool, graphs: bool,
    backbone_only: bool = False,
) -> DraftingSide:  # fmt: skip
    """The drafting side on the drafter's device."""
    extra = {"graphs": graphs} if runner == "fast" else {}
    _, on_drafter, on_heads = RUNNERS[runner]
    head = None if backbone_only else on_heads(drafter.lm_head, drafter.head, sampling, **extra)
    return DraftingSide(on_drafter(drafter, batch, slots, all_logits, **extra), head)


def chosen_runner(runner: str, target: Target, drafter: MDFlashModel | None) -> str:
    """ "auto" resolved; ValueError where "fast" does not fit."""
    reason = why_not_fast(target) or (drafter is not None and why_not_fast_drafter(drafter)) or None
    if runner == "fast" and reason:
        raise ValueError(f"runner='fast' does not fit {type(target.model).__name__}: {reason}; use 'eager' or 'auto'")
    if runner == "auto":
        return "fast" if target.device.type == "cuda" and not reason else "eager"
    return runner


def heads_for(target: Target, drafter: MDFlashModel) -> tuple[nn.Linear, nn.Module]:
    """The drafter's LM head and Markov head on the target's device; the target's own LM head where it is the same."""
    ours, theirs = drafter.lm_head, target.lm_head
    same = ours.weight.dtype == theirs.weight.dtype and torch.equal(ours.weight.to(theirs.weight.device), theirs.weight)
    return theirs if same else deepcopy(ours).to(target.device), deepcopy(drafter.head).to(target.device)


def check_method(method: str, drafter: MDFlashModel | None) -> None:
    """The method exists and the checkpoint fits it."""
    if method not in METHODS:
        raise ValueError(f"method={method!r}: use one of {', '.join(METHODS)}")
    if method == "autoregressive":
        return
    if drafter is None:
        raise ValueError(f"method={method!r} needs a drafter: load one with mdflash.load_drafter")
    rank = drafter.config.markov_rank
    if method == "dflash" and rank:
        raise ValueError(f"method='dflash' needs a rank-0 checkpoint, this one has markov_rank={rank}: use 'dspark'")
    if method == "dspark" and not rank:
        raise ValueError("method='dspark' needs a Markov head, this checkpoint has markov_rank=0: use 'dflash'")


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
