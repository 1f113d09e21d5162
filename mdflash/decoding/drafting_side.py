"""What happens on the drafting side of a link: everything a schedule asks of backbone and heads, by name."""

from torch import Tensor

from .drafter_runner import Branches, DrafterRunner
from .head_runner import HeadRunner
from .types import Draft


class DraftingSide:
    """Backbone and heads behind a link, on one device; either may be elsewhere (None)."""

    def __init__(self, drafter: DrafterRunner | None, head: HeadRunner | None):
        self.drafter, self.head = drafter, head

    def keep(self, *sent):
        """What was sent ahead of the work that needs it."""
        return sent

    def cold_start(self, features: Tensor, first: Tensor, start: Tensor, limit: int, rows: list[int]) -> Tensor:
        """See DrafterRunner.cold_start."""
        return self.drafter.cold_start(features, first, start, limit, rows)

    def cold_window(self, hidden: Tensor, first: Tensor, noise: Tensor | None) -> Draft:
        """See HeadRunner.window."""
        return self.head.cold_window(hidden, first, noise)

    def guess(self, *given) -> Tensor:
        """See DrafterRunner.guess."""
        return self.drafter.guess(*given)

    def tree(self, *given) -> Branches:
        """See DrafterRunner.tree."""
        return self.drafter.tree(*given)

    def draft(self, branches: Branches, outcome: Tensor, noise: Tensor | None) -> tuple[Draft, bool]:
        """The next block's draft, and whether a backbone pass had to start after the barrier for it: a fallback."""
        passes = self.drafter.passes if self.drafter else 0
        draft = self.head.branch(branches, outcome, noise)
        return draft, bool(self.drafter) and self.drafter.passes > passes

    def append(self, sent: tuple[Tensor, Tensor]) -> None:
        """See DrafterRunner.append; features and their start, kept before."""
        self.drafter.append(*sent)
