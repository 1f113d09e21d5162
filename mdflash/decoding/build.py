"""From a target, a drafter and a deployment to a schedule: which runners serve, over which link."""

from copy import deepcopy

import torch
from torch import nn

from ..drafter import MDFlashModel
from ..drafter.sampling import Sampling
from ..target import Target
from .autoregressive import Autoregressive
from .deployment import Deployment
from .dpara import DPara
from .drafter_runner import DrafterRunner
from .drafting_side import DraftingSide
from .fast import FastDrafterRunner, FastHeadRunner, FastTargetRunner, why_not_fast, why_not_fast_drafter
from .head_runner import HeadRunner
from .link import Here, make_link
from .remote import connect, remote_side
from .schedule import Noise, Schedule
from .serial import Serial
from .target_runner import TargetRunner

METHODS = ("autoregressive", "dspark", "dflash", "dpara")
RUNNERS = {
    "eager": (TargetRunner, DrafterRunner, HeadRunner),
    "fast": (FastTargetRunner, FastDrafterRunner, FastHeadRunner),
}


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
    in_flight = deployment.in_flight_taps if method == "dpara" else 0
    if in_flight:
        drafter.config.check_taps("in_flight_taps", in_flight)
    events = {"tap_events": deployment.tap_events or in_flight > 0} if extra else {}
    target_runner = RUNNERS[runner][0](target, taps, sampling, batch, slots, **extra, **events)
    noise = Noise(batch, tokens + lag, d, target.device, sampling.greedy)
    if drafter is None:
        return Autoregressive(target_runner, noise)
    guesses = deployment.bonus_guesses if method == "dpara" else 0
    if guesses >= target.config.vocab_size:
        raise ValueError(f"bonus_guesses={guesses}: the vocabulary has {target.config.vocab_size} tokens; use a few")
    settings = {
        "runner": runner, "batch": batch, "slots": slots, "graphs": deployment.graphs, "guesses": guesses,
        "all_logits": deployment.all_logits(batch * (d + 1) * (1 + guesses) * d), "in_flight": in_flight,
        "alternatives": guesses if deployment.guess_source == "draft" else 0,
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
        return DPara(target_runner, d, noise, link, None, in_flight, guesses, settings["alternatives"])
    near = there == target.device
    heads = (drafter.lm_head, drafter.head) if near else heads_for(target, drafter)
    named = settings["alternatives"]
    head_runner = RUNNERS[runner][2](*heads, sampling, named, **(extra | {"near": near} if extra else {}))
    return DPara(target_runner, d, noise, link, Here(DraftingSide(None, head_runner)), in_flight, guesses, named)


def build_side(
    drafter: MDFlashModel, sampling: Sampling, runner: str, batch: int, slots: int, all_logits: bool, graphs: bool,
    in_flight: int = 0, guesses: int = 0, alternatives: int = 0, backbone_only: bool = False,
) -> DraftingSide:  # fmt: skip
    """The drafting side on the drafter's device."""
    extra = {"graphs": graphs} if runner == "fast" else {}
    flying = {"in_flight": in_flight} if runner == "fast" else {}
    _, on_drafter, on_heads = RUNNERS[runner]
    head = None if backbone_only else on_heads(drafter.lm_head, drafter.head, sampling, alternatives, **extra)
    return DraftingSide(on_drafter(drafter, batch, slots, all_logits, guesses, **flying, **extra), head)


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
