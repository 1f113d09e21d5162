"""The runners' fast path: the passes of every round as one CUDA graph a shape. Prefills stay with the eager one. Both give
the eager runners' answers (equal ids in fp32); what they return is the graph's own, to be read before its next replay."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ...drafter import Layout, MDFlashModel, Rows
from ...drafter.tree import dense_mask
from ...target import Target
from ..acceptance import decide
from ..drafter_runner import Branches, DrafterRunner, first_slots, guess_bonuses
from ..head_runner import HeadRunner
from ..target_runner import Early, TargetRunner, start_untapped
from ..types import Block, Draft, Verdict
from .decoder import FastDecoder, FastLayers, RotationTable
from .graphs import Graphed
from .head import greedy_draft, is_fusible

MOST_ROWS, MOST_REQUESTS = 16, 64  # of a verify pass; of the fused greedy head


class FastTargetRunner(TargetRunner):
    """Verification, acceptance included, as one graph. tap_events: `tapped[i]` is recorded within it as soon as tap i's part of
    the features is written, so that another device may read it while the later layers run."""

    def __init__(self, target: Target, *args, graphs: bool = True, tap_events: bool = False):
        super().__init__(target, *args)
        on = tap_events and target.device.type == "cuda"
        self.tapped = [torch.cuda.Event(external=graphs) for _ in self.taps] if on else []
        self.decoder = FastDecoder(target)
        self.rotation = RotationTable(
            target.decoder.rotary_emb, target.decoder.norm.weight, self.cache.pairs[0][0].shape[2]
        )
        self.graph = Graphed(self._verify, graphs)

    def verify(self, block: Block, noise_Bn: Tensor | None, early: Sequence[Early] = ()) -> Verdict:
        if block.draft is not None and block.draft.tokens.shape[1] >= MOST_ROWS:
            return super().verify(block, noise_Bn, early)
        draft = block.draft or Draft(None)
        start_untapped(early)
        verdict = self.graph(block.first, block.start, draft.tokens, draft.q, noise_Bn, draft.guessed)
        for count, work in early:
            if count:  # the pass is enqueued as a whole; its events open the taps while it runs
                width = count * self.target.config.hidden_size
                work(verdict.features[..., :width], self.tapped[count - 1] if self.tapped else None)
        return verdict

    def _verify(
        self, first_B: Tensor, start_B: Tensor, drafts_Bn: Tensor | None, q: Tensor | None, noise: Tensor | None,
        guessed_B: Tensor | None,
    ) -> Verdict:  # fmt: skip
        block = Block(first_B, None if drafts_Bn is None else Draft(drafts_Bn, q), start_B, None, 0)
        ids_BQ = block.tokens
        record = (lambda tap: self.tapped[tap].record()) if self.tapped else None
        hidden, features = self.decoder.forward(ids_BQ, start_B, self.cache.pairs, self.taps, record, self.rotation)
        outcome = decide(self.target.logits(hidden), block.draft, noise, self.sampling)
        return Verdict.of(*outcome, ids_BQ[:, 1:], features, guessed_B)


class FastDrafterRunner(DrafterRunner):
    """Appending features, the serial window and the tree as one graph each; a pass's own keys and values use the slots past
    the context (in-flight columns first, then rows), which the next features overwrite."""

    def __init__(
        self, drafter: MDFlashModel, batch: int, slots: int, all_logits: bool, guesses: int = 0, in_flight: int = 0,
        graphs: bool = True,
    ):  # fmt: skip
        d = drafter.draft_length
        self.layouts = {"serial": Layout.serial(d), "spine": Layout.anchors(d), "tree": Layout.tree(d, guesses)}
        spare = self.layouts["tree"].rows + (d + 1) * bool(in_flight)
        super().__init__(drafter, batch, slots + spare, all_logits, guesses)
        self.stack = FastLayers(drafter.layers, drafter.norm, drafter.config.head_dim**-0.5)
        self.pairs = [(layer.key, layer.value) for layer in self.context]
        self.rotation = RotationTable(drafter.rotary_emb, drafter.norm.weight, slots + spare)
        flying = {
            "serial": 0,
            "spine": max(0, in_flight - 1),
            "tree": in_flight,
        }  # the spine guesses behind the tap before
        self.own = {name: self._own_slots(layout, flying[name]) for name, layout in self.layouts.items()}
        self.offset = {name: torch.tensor(layout.offset, device=self.device) for name, layout in self.layouts.items()}
        self.graphs = {
            name: Graphed(work, graphs)
            for name, work in {
                "append": self._append, "serial": self._serial, "guess": self._guess, "tree": self._tree,
            }.items()
        }  # fmt: skip

    def append(self, features_BQF: Tensor, start_B: Tensor) -> None:
        self.graphs["append"](features_BQF, start_B)

    def serial(self, first_B: Tensor, start_B: Tensor, limit: int, rows: list[int] | None = None) -> Tensor:
        self.passes += 1
        return self.graphs["serial"](first_B, start_B)

    def guess(
        self, tokens_Bn: Tensor, start_B: Tensor, limit: int, in_flight_BnF: Tensor | None = None,
        alternatives_BdF: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        if alternatives_BdF is not None:
            return super().guess(tokens_Bn, start_B, limit, in_flight_BnF, alternatives_BdF)
        self.passes += 1
        return self.graphs["guess"](tokens_Bn, start_B, in_flight_BnF)

    def tree(
        self, tokens_Bn: Tensor, start_B: Tensor, limit: int, in_flight_BnF: Tensor | None = None,
        guesses_BnF: Tensor | None = None,
    ) -> Branches:  # fmt: skip
        self.passes += 1
        return Branches(*self.graphs["tree"](tokens_Bn, start_B, in_flight_BnF, guesses_BnF))

    def _append(self, features_BQF: Tensor, start_B: Tensor) -> None:
        """Features of the earliest taps alone are those whose later ones are zero."""
        drafter, do = self.drafter, self.stack.ops
        positions_BQ = start_B[:, None] + torch.arange(features_BQF.shape[1], device=self.device)
        x = F.linear(features_BQF.to(drafter.dtype), drafter.fc.weight[:, : features_BQF.shape[2]])
        x, _ = do.add_norm(x, None, drafter.hidden_norm.weight, drafter.hidden_norm.variance_epsilon)
        self.stack.store(x, *self.rotation(positions_BQ), start_B, self.pairs)

    def _serial(self, first_B: Tensor, start_B: Tensor) -> Tensor:
        anchors = first_B.new_empty(len(first_B), 1, 0)
        return self._pass("serial", start_B, anchors, first_B[:, None, None])[:, 0]

    def _guess(self, tokens_Bn: Tensor, start_B: Tensor, in_flight_BnF: Tensor | None) -> Tensor:
        if in_flight_BnF is not None:
            self._append(in_flight_BnF, start_B)
        spine_BnC = self._rows_of("spine", start_B, tokens_Bn[:, None])
        return guess_bonuses(self.drafter, spine_BnC, tokens_Bn, self.guesses)

    def _tree(
        self, tokens_Bn: Tensor, start_B: Tensor, in_flight_BnF: Tensor | None, guesses_BnF: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        if in_flight_BnF is not None:
            self._append(in_flight_BnF, start_B)
        first = first_slots(guesses_BnF, self.drafter.config.mask_token_id)
        hidden = self._pass("tree", start_B, tokens_Bn[:, None], first)
        return hidden, self.drafter.lm_head(hidden) if self.all_logits else None, guesses_BnF

    def _pass(self, name: str, start_B: Tensor, anchors: Tensor, first: Tensor | None) -> Tensor:
        """Hidden states [B, branches, d, C]."""
        layout = self.layouts[name]
        hidden_BRC = self._rows_of(name, start_B, anchors, first)
        return hidden_BRC[:, layout.spine :].contiguous().unflatten(1, (len(layout.branches), layout.d))

    def _rows_of(self, name: str, start_B: Tensor, anchors: Tensor, first: Tensor | None = None) -> Tensor:
        ids_BR = self.layouts[name].token_ids(anchors, self.drafter.config.mask_token_id, first)[:, 0]
        x = F.embedding(ids_BR, self.drafter.embed_tokens.weight).to(self.drafter.dtype)
        rotation = self.rotation(start_B[:, None] + self.offset[name])
        return self.stack.forward(x, *rotation, start_B, self.own[name], self.pairs)

    def _own_slots(self, layout: Layout, in_flight: int) -> Tensor:
        """The visibility rule between a tree's rows and its own slots, in-flight columns and rows: [R, E] int8."""
        nowhere = torch.zeros(1, 1, dtype=torch.long, device=self.device)
        taps = nowhere + in_flight if in_flight else None
        rows = Rows.build(layout, nowhere, nowhere[..., None].expand(1, 1, layout.rows), taps_BN=taps)
        return dense_mask(rows, 0)[0, 0].to(torch.int8).contiguous()


class FastHeadRunner(HeadRunner):
    """The heads as one graph; greedy steps of a vanilla head take two kernels each. near: the branches lie where the tree's
    graph leaves them, on the same device."""

    def __init__(self, *args, graphs: bool = True, near: bool = True):
        super().__init__(*args)
        self.fused = self.sampling.greedy and is_fusible(self.markov_head) and not self.alternatives
        self.graphs = {
            "window": Graphed(super().window, graphs),
            "branch": Graphed(self._branch, graphs, 3 if near else 0),
        }

    def window(self, hidden_BdC: Tensor, bonus_B: Tensor, noise_Bd: Tensor | None) -> Draft:
        return self.graphs["window"](hidden_BdC, bonus_B, noise_Bd)

    def branch(self, branches: Branches, outcome_Bn: Tensor, noise_Bd: Tensor | None) -> Draft:
        return self.graphs["branch"](branches.hidden, branches.logits, branches.guesses, outcome_Bn, noise_Bd)

    def _branch(self, hidden, logits, guesses, outcome_Bn: Tensor, noise_Bd: Tensor | None) -> Draft:
        return super().branch(Branches(hidden, logits, guesses), outcome_Bn, noise_Bd)

    def _draft(self, logits_BdV: Tensor, hidden_BdC: Tensor, bonus_B: Tensor, noise_Bd: Tensor | None) -> Draft:
        if self.fused and len(bonus_B) <= MOST_REQUESTS:
            return Draft(greedy_draft(logits_BdV, bonus_B, self.markov_head))
        return super()._draft(logits_BdV, hidden_BdC, bonus_B, noise_Bd)
