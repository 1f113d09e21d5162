"""Where a decoding round's time goes: device events around the runners' calls, read when the rounds are over."""

import statistics
import time
from collections import defaultdict
from itertools import pairwise, product

import torch

from mdflash.decoding.schedule import Schedule

WARM_UP_ROUNDS = 30
WAITED_MS = 0.06  # a head that starts later than this behind the tree has waited for the verify pass, not the reverse
CALLS = {"target": ("verify",), "drafter": ("guess", "tree", "serial", "append"), "head": ("branch", "window")}


class Timeline:
    """Watches a schedule from its construction on: begin and end of every runner's call, on the stream it is enqueued to, and
    the host's time for enqueuing a round."""

    def __init__(self, schedule: Schedule):
        self.spans: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = defaultdict(list)
        self.host_ms: list[float] = []
        links = [getattr(schedule, name) for name in ("link", "heads") if hasattr(schedule, name)]
        holders = [schedule, *(link.side for link in dict.fromkeys(links))]
        for holder, (runner, names) in product(holders, CALLS.items()):
            if getattr(holder, runner, None) is not None:
                for name in names:
                    self._watch(getattr(holder, runner), name)
        step = schedule.step

        def timed_step():
            began = time.perf_counter()
            result = step()
            self.host_ms.append((time.perf_counter() - began) * 1e3)
            return result

        schedule.step = timed_step

    def _watch(self, runner, name: str) -> None:
        work = getattr(runner, name)

        def timed(*args):
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in "be")
            began.record()
            result = work(*args)
            ended.record()
            self.spans[name].append((began, ended))
            return result

        setattr(runner, name, timed)

    def figures(self) -> dict[str, float]:
        """Medians in ms over the rounds after the warm-up. exposed: from a verify pass's end to the next one's begin.
        hidden_share: rounds whose head did not wait for logits after the verify pass; drafter_waits: how long it waited for
        the verify pass instead."""
        torch.cuda.synchronize()
        spans = {name: pairs[WARM_UP_ROUNDS:-1] for name, pairs in self.spans.items()}
        verify, rounds = spans["verify"], len(spans["verify"])
        found = {"rounds": rounds, "step": middle(a[0].elapsed_time(b[0]) for a, b in pairwise(verify))}
        found |= {
            name: middle(began.elapsed_time(ended) for began, ended in pairs) for name, pairs in spans.items() if pairs
        }
        found["exposed"] = middle(a[1].elapsed_time(b[0]) for a, b in pairwise(verify))
        found["host"] = middle(self.host_ms[WARM_UP_ROUNDS:])
        if spans.get("tree") and spans.get("branch"):
            before, after = spans["tree"], spans["branch"]
            if before[0][1].device == after[0][0].device:
                waits = [a[1].elapsed_time(b[0]) for a, b in zip(before, after, strict=False)]
                hidden = [wait > WAITED_MS for wait in waits]
                found["drafter_waits"] = middle(waits)
            else:  # the heads sit with the target
                hidden = [a[1].elapsed_time(b[0]) <= WAITED_MS for a, b in zip(verify, after, strict=False)]
            found["hidden_share"] = round(sum(hidden) / len(hidden), 4)
        return found

    def trace(self, rounds: int = 12) -> list[dict]:
        """Complete events (Chrome trace format) of some rounds, a thread for each side. Clocks of two GPUs do not compare: a
        device's spans are placed by its first call, the verify pass and the tree beginning together."""
        torch.cuda.synchronize()
        events, zero = [], {}
        for name, pairs in self.spans.items():
            pairs = pairs[WARM_UP_ROUNDS : WARM_UP_ROUNDS + rounds]
            for began, ended in pairs:
                device = began.device
                start = zero.setdefault(device, began)
                side = next(side for side, names in CALLS.items() if name in names)
                at, lasts = start.elapsed_time(began), began.elapsed_time(ended)
                events.append(
                    {"name": name, "ph": "X", "ts": at * 1e3, "dur": lasts * 1e3, "pid": str(device), "tid": side}
                )
        return events


def middle(values) -> float:
    """The median, to a tenth of a microsecond."""
    return round(statistics.median(values), 4)
