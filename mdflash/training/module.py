"""What the training engine wraps: the drafter, with the frozen target beside it but outside its parameters."""

import torch
from torch import Tensor, nn

from ..drafter import Layout, MDFlashModel, Rows
from ..target import Target
from .loss import LossWeights, Windows, loss_sum


class Lent(nn.Module):
    """A module of the target used in the drafter's place: no parameters, no state-dict keys, no copy, untouched by ZeRO."""

    def __init__(self, owner: nn.Module):
        super().__init__()
        self._owner = (owner,)  # a tuple hides the module from registration

    def forward(self, x: Tensor) -> Tensor:
        return self._owner[0](x)


class DrafterForTraining(nn.Module):
    """One training step's arithmetic: ids and starts in, the loss numerator out.

    The drafter's embedding and LM head are lent by the target, on whose device both live; they must hold the same values
    (ValueError: the drafter belongs to another target).
    """

    def __init__(
        self, drafter: MDFlashModel, target: Target, layout: Layout, weights: LossWeights, loss_rows: int, bf16: bool
    ):
        super().__init__()
        self._check_same_embeddings(drafter, target)
        self.drafter = drafter
        self.drafter.embed_tokens, self.drafter.lm_head = Lent(target.embed_tokens), Lent(target.lm_head)
        self._target = (target,)
        self.layout, self.weights, self.loss_rows, self.bf16 = layout, weights, loss_rows, bf16

    def forward(self, ids: Tensor, start: Tensor, weight: Tensor) -> Tensor:
        """ids [B, T], start [B, N], weight m·w [B, N, b, d] -> Σ m_i w_i loss_i, fp32 scalar."""
        target = self._target[0]
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=self.bf16):
            # 1. features of every position and the teacher's final-norm states, from one frozen pass
            seen = target.forward(ids, self.drafter.config.target_layer_ids)
            # 2. the trees' rows: true tokens as anchors, masks (or the known bonus, k = 0) in the slots
            rows = self._rows(ids, start)
            # 3. the backbone over [context ; rows]
            features = seen.features if self.bf16 else seen.features.float()
            hidden = rows.branches(self.drafter(features, rows))
            # 4. the windows that have a label
            windows = self._windows(ids, start, weight, hidden, seen.hidden)
            # 5. loss over chunks of their rows
            return loss_sum(self.drafter, target.lm_head, windows, self.weights, self.loss_rows)

    def _rows(self, ids: Tensor, start: Tensor) -> Rows:
        layout = self.layout
        anchors = self._tokens(ids, start[..., None] + torch.arange(layout.spine, device=ids.device))
        first = ids.gather(1, start)[..., None] if layout.branches == (0,) else None
        row_ids = layout.token_ids(anchors, self.drafter.config.mask_token_id, first)
        return Rows.build(layout, start, row_ids)

    def _windows(self, ids: Tensor, start: Tensor, weight: Tensor, hidden: Tensor, states: Tensor) -> Windows:
        """Gather each window's teacher states and tokens; drop windows without a label."""
        layout = self.layout
        k, i = torch.tensor(layout.branches, device=ids.device), torch.arange(1, layout.d + 1, device=ids.device)
        label_at = (start[..., None, None] + k[:, None] + i).clamp(max=ids.shape[1] - 1)
        teacher_at = (start[..., None, None] + k[:, None] + i - 1).clamp(max=ids.shape[1] - 1)
        valid = weight.sum(-1) > 0
        text = torch.arange(ids.shape[0], device=ids.device)[:, None, None].expand_as(valid)[valid]
        return Windows(
            hidden=hidden[valid],
            teacher=states[text[:, None], teacher_at[valid]],
            previous=self._tokens(ids, teacher_at)[valid],
            labels=self._tokens(ids, label_at)[valid],
            weight=weight[valid],
        )

    @staticmethod
    def _tokens(ids: Tensor, at: Tensor) -> Tensor:
        """ids [B, T] at positions [B, ...]."""
        return ids.gather(1, at.flatten(1).clamp(max=ids.shape[1] - 1)).view(at.shape)

    @staticmethod
    def _check_same_embeddings(drafter: MDFlashModel, target: Target) -> None:
        pairs = {
            "embed_tokens": (drafter.embed_tokens, target.embed_tokens),
            "lm_head": (drafter.lm_head, target.lm_head),
        }
        for name, (ours, theirs) in pairs.items():
            mine, other = ours.weight, theirs.weight
            if mine.shape != other.shape or not torch.equal(mine.to(other.device, other.dtype), other):
                raise ValueError(
                    f"the drafter's {name} differs from the target's: it was made for another target (or revision, or "
                    "dtype); load the matching pair"
                )
