"""The window loss without its logits: LM head, Markov bias, both terms and the gradient, a chunk of slots at a time.

R slots, C hidden size, K Markov rank, V vocabulary. The gradient of a chunk is made right after its loss, so its two
[chunk, V] tensors (drafter, teacher) are all that ever exists, and backward only scales what was kept: [R, C] and [R, K].
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def slot_terms(
    logits_RV: Tensor, teacher_RV: Tensor | None, labels_R: Tensor, weight_R: Tensor, factors: tuple[float, float],
    gradient: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Cross-entropy -log q(y) and Σ_v |q - p| of every slot, fp32 [R]; 0 distance without a teacher.

    `gradient` overwrites the logits with d Σ weight (f_0 CE + f_1 Σ|q-p|) / d logits. With s = sign(q - p):
    dCE = q - 1_y and dΣ|q-p| = q (s - Σ_v s_v q_v).
    """
    log_q = logits_RV.float().log_softmax(-1)
    cross_entropy, q = -log_q.gather(1, labels_R[:, None])[:, 0], log_q.exp_()
    delta = torch.zeros_like(q) if teacher_RV is None else q - teacher_RV.float().softmax(-1)
    distance = delta.abs().sum(-1)
    if gradient:
        slope = delta.sign_()
        slope.sub_((slope * q).sum(-1, keepdim=True)).mul_(factors[1]).add_(factors[0]).mul_(q)
        slope.scatter_add_(1, labels_R[:, None], slope.new_full((len(labels_R), 1), -factors[0]))
        logits_RV.copy_(slope.mul_(weight_R[:, None]))
    return cross_entropy, distance


class FusedWindowLoss(torch.autograd.Function):
    """Σ weight (f_0 CE + f_1 Σ|q-p|) of logits = hidden·Wᵀ + code·W2ᵀ, and every slot's Σ|q-p| (not differentiable)."""

    @staticmethod
    def forward(
        ctx, hidden_RC: Tensor, code_RK: Tensor | None, lm_weight_VC: Tensor, code_weight_VK: Tensor | None,
        teacher_RC: Tensor | None, labels_R: Tensor, weight_R: Tensor, factors: tuple[float, float], chunk: int,
    ):  # fmt: skip
        """Gradients go to hidden, code and W2 where they are asked for, never to the LM head or the teacher."""
        device = hidden_RC.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden_RC.dtype
        to_hidden, to_code, _, to_code_weight = ctx.needs_input_grad[:4]
        with torch.autocast(device, enabled=False):
            h, W, t = (x if x is None else x.to(dtype) for x in (hidden_RC, lm_weight_VC, teacher_RC))
            e, W2 = (x if x is None else x.to(dtype) for x in (code_RK, code_weight_VK))
            total, distance = h.new_zeros((), dtype=torch.float32), h.new_empty(len(h), dtype=torch.float32)
            dh = torch.empty_like(h) if to_hidden else None
            de = torch.empty_like(e) if to_code else None
            dW2 = torch.zeros_like(W2, dtype=torch.float32) if to_code_weight else None
            measure = terms_for(h.device)
            for part in (slice(at, at + chunk) for at in range(0, len(h), chunk)):
                z = h[part] @ W.T
                if e is not None:
                    z.addmm_(e[part], W2.T)
                teacher = None if t is None else t[part] @ W.T
                cross_entropy, distance[part] = measure(
                    z, teacher, labels_R[part], weight_R[part], factors, to_hidden or to_code or to_code_weight
                )
                total += (weight_R[part] * (factors[0] * cross_entropy + factors[1] * distance[part])).sum()
                if to_hidden:
                    torch.mm(z, W, out=dh[part])
                if to_code:
                    torch.mm(z, W2, out=de[part])
                if to_code_weight:
                    dW2 += z.T @ e[part]
                del z, teacher
        ctx.save_for_backward(dh, de, dW2)
        ctx.dtypes = [None if x is None else x.dtype for x in (hidden_RC, code_RK, code_weight_VK)]
        ctx.mark_non_differentiable(distance)
        return total, distance

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream, _):
        """Scale what forward kept."""
        hidden, code, code_weight = (
            None if kept is None else kept.to(dtype) * upstream
            for kept, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        )
        return hidden, code, None, code_weight, None, None, None, None, None


def terms_for(device: torch.device):
    """The Triton kernel on GPUs, plain PyTorch elsewhere."""
    if device.type != "cuda":
        return slot_terms
    from .slot_kernel import slot_terms_cuda

    return slot_terms_cuda
