"""DPara: the backbone precomputes every acceptance boundary while the target verifies (docs/method.md)."""

import torch

from .drafter_runner import DrafterRunner
from .link import Link
from .schedule import Noise, Schedule
from .target_runner import TargetRunner
from .types import Verdict


class DPara(Schedule):
    """Only the head stays on the critical path: T_step = max(T_verify, T_precompute) + T_head."""

    def __init__(self, target: TargetRunner, drafter: DrafterRunner, noise: Noise, timeout_s: float):
        super().__init__(target, drafter, noise)
        self.link = Link(drafter.device, timeout_s)

    def round(self) -> Verdict:
        block, drafter = self.block, self.drafter
        # 1. precompute starts on the drafting device: a branch for every r, features < p
        drafter.after_barrier = False
        precompute = self.link.submit(drafter.tree, block)
        # 2. meanwhile the target verifies the same block: r, b, features of t_0..t_d
        verdict = self.target.verify(block, self.noise.verify())
        # 3. barrier; a backbone pass that starts from here on would be a fallback
        branches = self.link.wait(precompute)
        drafter.after_barrier = True
        # 4. pick branch r and run the head from y_0 = b
        row, accepted = torch.arange(len(branches), device=drafter.device), verdict.accepted.to(drafter.device)
        draft = drafter.head(branches[row, accepted], verdict.bonus, self.noise.draft())
        # 5. append the features; those past t_r lie at or above the next p, where no row sees them
        drafter.append(verdict.features, block.positions)
        # 6. next block: (b, y_1..y_d) at p + r + 1
        self.block = block.next(verdict, draft)
        return verdict

    def close(self) -> None:
        self.link.close()
