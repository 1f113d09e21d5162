"""The heads' side of every schedule: LM head and Markov head on one window. Legend: drafter/tree.py."""

import torch
from torch import Tensor, nn

from ..drafter.sampling import Sampling
from .drafter_runner import Branches
from .types import Draft


class HeadRunner:
    """Turns a window's hidden states into a draft, on the device that its modules live on."""

    def __init__(self, lm_head: nn.Linear, markov_head: nn.Module, sampling: Sampling):
        self.lm_head, self.markov_head, self.sampling = lm_head, markov_head, sampling

    @torch.no_grad()
    def window(self, hidden_BdC: Tensor, bonus_B: Tensor, noise_Bd: Tensor | None) -> Draft:
        """d steps from y_0 = the bonus."""
        return self._draft(self.lm_head(hidden_BdC), hidden_BdC, bonus_B, noise_Bd)

    cold_window = window  # behind a prefill, whose rows are any number: never worth a graph

    @torch.no_grad()
    def branch(self, branches: Branches, outcome_Bn: Tensor, noise_Bd: Tensor | None) -> Draft:
        """The same on the branch that a verdict's outcome picks, whose logits may be there already."""
        accepted_B, bonus_B = outcome_Bn[:, 0], outcome_Bn[:, 1]
        row = torch.arange(len(accepted_B), device=accepted_B.device)
        hidden_BdC = branches.hidden[row, accepted_B]
        ready = branches.logits is not None
        logits_BdV = branches.logits[row, accepted_B] if ready else self.lm_head(hidden_BdC)
        return self._draft(logits_BdV, hidden_BdC, bonus_B, noise_Bd)

    def _draft(self, logits_BdV: Tensor, hidden_BdC: Tensor, bonus_B: Tensor, noise_Bd: Tensor | None) -> Draft:
        return Draft(*self.markov_head.draft(logits_BdV, bonus_B, hidden_BdC, noise_Bd, self.sampling))
