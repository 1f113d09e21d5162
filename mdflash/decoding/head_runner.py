"""The heads' side of every schedule: LM head and Markov head on one window. Legend: drafter/tree.py."""

from dataclasses import replace

import torch
from torch import Tensor, nn

from ..drafter.sampling import Sampling
from .drafter_runner import Branches
from .types import Draft


class HeadRunner:
    """Turns a window's hidden states into a draft, on the device that its modules live on. alternatives: how many of every
    slot's other tokens the draft names."""

    def __init__(self, lm_head: nn.Linear, markov_head: nn.Module, sampling: Sampling, alternatives: int = 0):
        self.lm_head, self.markov_head, self.sampling, self.alternatives = lm_head, markov_head, sampling, alternatives

    @torch.no_grad()
    def window(self, hidden_BdC: Tensor, bonus_B: Tensor, noise_Bd: Tensor | None) -> Draft:
        """d steps from y_0 = the bonus."""
        return self._draft(self.lm_head(hidden_BdC), hidden_BdC, bonus_B, noise_Bd)

    cold_window = window  # behind a prefill, whose rows are any number: never worth a graph

    @torch.no_grad()
    def branch(self, branches: Branches, outcome_Bn: Tensor, noise_Bd: Tensor | None) -> Draft:
        """The same on the branch that a verdict's outcome picks, whose logits may be there already."""
        chosen_B, guessed_B = branches.chosen(outcome_Bn)
        row = torch.arange(len(chosen_B), device=chosen_B.device)
        hidden_BdC = branches.hidden[row, chosen_B]
        ready = branches.logits is not None
        logits_BdV = branches.logits[row, chosen_B] if ready else self.lm_head(hidden_BdC)
        draft = self._draft(logits_BdV, hidden_BdC, outcome_Bn[:, 1], noise_Bd)
        return draft if guessed_B is None else replace(draft, guessed=guessed_B.long())

    def _draft(self, logits_BdV: Tensor, hidden_BdC: Tensor, bonus_B: Tensor, noise_Bd: Tensor | None) -> Draft:
        given = logits_BdV, bonus_B, hidden_BdC, noise_Bd, self.sampling, self.alternatives
        tokens, q, alternatives = self.markov_head.draft(*given)
        return Draft(tokens, q, alternatives=alternatives)
