"""The rounds of greedy decoding from answers that are known already, without caches, links or kernels.

The answer alone says how a round ends: r is how far the draft agrees with it. What the next draft sees (features < p, the
accepted tokens, what is in flight of them, the bonus where it was guessed) is read off the answer's own pass. Shape legend:
mdflash/drafter/tree.py.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mdflash import MDFlashModel, Target
from mdflash.decoding.drafter_runner import alternatives_as_guesses, guess_bonuses
from mdflash.decoding.types import Round
from mdflash.drafter import Layout, Rows
from mdflash.drafter.backbone import ContextKV
from mdflash.drafter.sampling import Sampling

BEYOND_THE_END = -1
CROWDED = 0.75  # texts that are through leave the pass when fewer than this share go on


@dataclass(frozen=True)
class Setting:
    """What a round's draft may know. serial: every feature and the bonus (DSpark). in_flight_taps, guesses (its
    `bonus_guesses`), guess_source: see `Deployment`.
    bonus_known: an oracle that always guesses right."""

    serial: bool = False
    in_flight_taps: int = 0
    guesses: int = 0
    bonus_known: bool = False
    guess_source: str = "spine"


@torch.no_grad()
def replay(
    target: Target, drafter: MDFlashModel, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]],
    settings: Sequence[Setting],
) -> list[list[list[Round]]]:  # fmt: skip
    """The rounds of every setting and text (all texts at once). answers: greedy ones, the prefill's token first; target and
    drafter are on one device."""
    return [Texts(target, drafter, prompts, answers).rounds(setting) for setting in settings]


class Texts:
    """The answers' ids and projected features, and where each text stands."""

    def __init__(
        self, target: Target, drafter: MDFlashModel, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]
    ):
        self.drafter, d, device = drafter, drafter.draft_length, target.device
        texts = [torch.tensor([*prompt, *answer]) for prompt, answer in zip(prompts, answers, strict=True)]
        self.begin = torch.tensor([len(prompt) for prompt in prompts], device=device)
        self.end = torch.tensor([len(text) for text in texts], device=device)
        ids = pad_sequence(texts, batch_first=True).to(device)
        self.features = target.features(ids, drafter.config.target_layer_ids).to(drafter.dtype)
        self.context = drafter.project_context(self.features, torch.arange(ids.shape[1], device=device).expand_as(ids))
        behind = torch.arange(ids.shape[1] + d + 2, device=device)
        padded = torch.nn.functional.pad(ids, (0, d + 2))
        self.ids = torch.where(behind < self.end[:, None], padded, BEYOND_THE_END)

    def rounds(self, setting: Setting) -> list[list[Round]]:
        """Every text's rounds."""
        texts, d, found = self, self.drafter.draft_length, [[] for _ in self.ids]
        p, rounds, cold = self.begin, found, True
        guessed = torch.zeros_like(p, dtype=torch.bool)
        draft, others = self._serial(p, setting)
        while (going := p + 1 < texts.end).any():
            if going.float().mean() < CROWDED:
                texts, rounds = texts.only(going), [mine for mine, on in zip(rounds, going.tolist(), strict=True) if on]
                p, draft, guessed, others = (None if x is None else x[going] for x in (p, draft, guessed, others))
                going = going[going]
            row = torch.arange(len(p), device=p.device)
            truth = texts.ids[
                row[:, None], (p[:, None] + torch.arange(1, d + 2, device=p.device)).clamp(max=self._last)
            ]
            accepted = (draft == truth[:, :d]).long().cumprod(1).sum(1)
            bonus, after = truth[row, accepted], p + accepted + 1
            committed = torch.minimum(accepted + 1, texts.end - 1 - p)
            told = zip(*(x.tolist() for x in (going, accepted, draft, bonus, committed, guessed)), strict=True)
            for mine, (live, r, proposed, b, count, hit) in zip(rounds, told, strict=True):
                if live:
                    mine.append(Round(r, tuple(proposed), b, count, cold_start=cold, guessed=hit))
            block = torch.cat([texts.ids[row, p.clamp(max=self._last)][:, None], draft], 1)
            if setting.serial:
                draft, others = texts._serial(after, setting)
            else:
                draft, others, guessed = texts._branch(setting, p, block, others, accepted, bonus.clamp(min=0))
            p, cold = torch.where(going, after, p), False
        return found

    def only(self, chosen: Tensor) -> "Texts":
        """The texts of a mask [B]."""
        some = copy.copy(self)
        some.begin, some.end, some.ids, some.features = (
            x[chosen] for x in (self.begin, self.end, self.ids, self.features)
        )
        some.context = [ContextKV(layer.key[chosen], layer.value[chosen]) for layer in self.context]
        return some

    @property
    def _last(self) -> int:
        return self.ids.shape[1] - 1

    def _serial(self, p: Tensor, setting: Setting) -> tuple[Tensor, Tensor | None]:
        """The k = 0 window at p, its first token known: its draft and that one's alternatives."""
        row = torch.arange(len(p), device=p.device)
        first = self.ids[row, p.clamp(max=self._last)].clamp(min=0)
        rows, hidden = self._pass(Layout.serial(self.drafter.draft_length), p, first[:, None, None][..., :0], first, 0)
        return self._draft(rows.branches(hidden)[:, 0, 0], first, setting)

    def _branch(
        self, setting: Setting, p: Tensor, block: Tensor, others: Tensor | None, accepted: Tensor, bonus: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """The draft of branch r of the tree at p, its alternatives, and whether its first slot carried the bonus. others: the
        alternatives of the block's own draft."""
        d, mask, row = (
            self.drafter.draft_length,
            self.drafter.config.mask_token_id,
            torch.arange(len(p), device=p.device),
        )
        anchors, taps = block.clamp(min=0)[:, None], setting.in_flight_taps
        knows = torch.full_like(p, setting.bonus_known, dtype=torch.bool)
        if others is not None:
            knows = (alternatives_as_guesses(others, mask)[row, accepted] == bonus[:, None]).any(-1)
        elif setting.guesses:
            spine = self._pass(Layout.anchors(d), p, anchors, None, max(0, taps - 1))[1]
            guesses = guess_bonuses(self.drafter, spine, block.clamp(min=0), setting.guesses)
            knows = (guesses[row, accepted] == bonus[:, None]).any(-1)
        first = torch.full((len(p), d + 1), mask, device=p.device)
        first[row, accepted] = torch.where(knows, bonus, mask)
        rows, hidden = self._pass(Layout.tree(d), p, anchors, first, taps)
        return *self._draft(rows.branches(hidden)[row, 0, accepted], bonus, setting), knows

    def _pass(self, layout: Layout, p: Tensor, anchors: Tensor, first: Tensor | None, taps: int) -> tuple[Rows, Tensor]:
        """One tree a text at p."""
        first = None if first is None else first.view(len(p), 1, -1)
        ids = layout.token_ids(anchors, self.drafter.config.mask_token_id, first)
        rows = Rows.build(layout, p[:, None], ids, taps_BN=torch.full_like(p, taps)[:, None] if taps else None)
        context = self.drafter.with_in_flight(self.context, self.features, rows) if taps else self.context
        return rows, self.drafter.forward_rows(rows, context, self.drafter.mask(rows, self.features.shape[1]))

    def _draft(self, hidden: Tensor, bonus: Tensor, setting: Setting) -> tuple[Tensor, Tensor | None]:
        named = setting.guesses if setting.guess_source == "draft" else 0
        tokens, _, others = self.drafter.head.draft(
            self.drafter.lm_head(hidden), bonus, hidden, None, Sampling(), named
        )
        return tokens, others


def comparable(rounds: Sequence[Round]) -> list[Round]:
    """Rounds without what lies past the answer's end, which a replay cannot know: the last one's r and bonus."""
    last = replace(rounds[-1], accepted=rounds[-1].committed, bonus=-1) if rounds else None
    return [*rounds[:-1], last] if rounds else []
