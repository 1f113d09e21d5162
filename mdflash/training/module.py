"""What the training engine wraps: the drafter, with the frozen target beside it but outside its parameters."""

from collections.abc import Callable, Sequence

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
        self, drafter: MDFlashModel, target: Target, layouts: Sequence[Layout], weights: LossWeights, loss_rows: int,
        bf16: bool,
    ):  # fmt: skip
        super().__init__()
        self._check_same_embeddings(drafter, target)
        self.drafter = drafter
        self.drafter.embed_tokens, self.drafter.lm_head = Lent(target.embed_tokens), Lent(target.lm_head)
        self._target = (target,)
        self.layouts, self.weights, self.loss_rows, self.bf16 = layouts, weights, loss_rows, bf16

    def forward(
        self, ids: Tensor, start: Tensor, weight: Tensor, known: Tensor, taps: Tensor | None = None,
        spine_weight: Tensor | None = None, first: Tensor | None = None, positions: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """A batch of `WindowDataset.collate`, packed (with `first` and `positions`) or not -> Σ m_i w_i loss_i, fp32 scalar."""
        target = self._target[0]

        def in_contexts(x_BT: Tensor) -> Tensor:  # packed: the rows of tokens, one behind the other, are one context
            return x_BT.reshape(len(start), -1, *x_BT.shape[2:])

        with torch.autocast(ids.device.type, torch.bfloat16, enabled=self.bf16):
            # 1. features of every position and the teacher's final-norm states, from one frozen pass
            seen = target.forward(ids, self.drafter.config.target_layer_ids, positions)
            ids, features, states = in_contexts(ids), in_contexts(seen.features), in_contexts(seen.hidden)
            # 2. the trees' rows: true tokens as anchors, masks in the slots, or the bonus in the first where it is known
            rows = self._rows(ids, start, torch.zeros_like(start) if first is None else first, known, taps)
            # 3. the backbone over [context ; rows]
            features = features if self.bf16 else features.float()
            hidden = self.drafter(features, rows, None if positions is None else in_contexts(positions))
            # 4. the windows that have a label
            windows = self._windows(ids, rows, rows.windows, weight, hidden, states)
            # 5. loss over chunks of their rows
            loss = loss_sum(self.drafter, target.lm_head, windows, self.weights, self.loss_rows)
            if spine_weight is None:
                return loss
            # 6. the anchors' own predictions, windows of one slot
            spine = self._windows(ids, rows, rows.spines, spine_weight[..., None], hidden, states)
            return loss + loss_sum(self.drafter, target.lm_head, spine, self.weights, self.loss_rows)

    def _rows(self, ids: Tensor, start: Tensor, first: Tensor, known: Tensor, taps: Tensor | None) -> Rows:
        """Each layout's trees, at as many starts each."""
        parts, count, mask = [], len(self.layouts), self.drafter.config.mask_token_id
        trees = start.shape[1] // count
        knows = known.split([trees * len(layout.branches) for layout in self.layouts], 1)
        flying = [None] * count if taps is None else taps.chunk(count, 1)
        columns = start.chunk(count, 1), first.chunk(count, 1)
        for layout, p, column, know, tap in zip(self.layouts, *columns, knows, flying, strict=True):
            at = (p + column)[..., None] + torch.arange(layout.spine + 1, device=ids.device)
            tokens = ids.gather(1, at.flatten(1).clamp(max=ids.shape[1] - 1)).view(at.shape)
            bonus = tokens[..., list(layout.branches)]
            slots = torch.where(know.view(bonus.shape), bonus, mask)
            parts.append(Rows.build(layout, p, layout.token_ids(tokens[..., :-1], mask, slots), column, tap))
        return Rows.join(parts)

    @staticmethod
    def _windows(
        ids: Tensor, rows: Rows, slots_of: Callable[[Tensor], Tensor], weight: Tensor, hidden: Tensor, states: Tensor
    ) -> Windows:
        """Gather each window's teacher states and tokens; drop windows without a label. slots_of picks the rows [B, W, d] that
        make them. A slot sits where its teacher does, one before its label. Beyond its text's end it has weight 0, whatever
        stands there."""
        valid = weight.sum(-1) > 0
        context = torch.arange(len(ids), device=ids.device)[:, None].expand_as(valid)[valid][:, None]
        at, last = slots_of(rows.first + rows.position)[valid], ids.shape[1] - 1
        teacher_at, label_at = at.clamp(max=last), (at + 1).clamp(max=last)
        return Windows(
            hidden=slots_of(hidden)[valid],
            teacher=states[context, teacher_at],
            previous=ids[context, teacher_at],
            labels=ids[context, label_at],
            weight=weight[valid],
        )

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
