"""The one acceptance rule: standard speculative sampling, of which greedy is the one-hot case."""

import torch
from torch import Tensor

from ..drafter.sampling import Sampling, draw
from .types import Draft


def decide(logits: Tensor, draft: Draft | None, noise: Tensor | None, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Verify a draft against the target's logits [B, n+1, V] at t_0..t_n: accepted r [B] and bonus b [B]. noise [B, n+1]
    uniforms, unread when greedy."""
    if sampling.greedy:
        return accept_greedy(logits, draft)
    return accept(sampling.distribution(logits), draft, noise)


def accept_greedy(logits: Tensor, draft: Draft | None) -> tuple[Tensor, Tensor]:
    """What `accept` gives for one-hot p and q, without writing them: a draft is accepted while it is the argmax."""
    choice = logits.argmax(-1)
    if draft is None:
        return torch.zeros_like(choice[:, 0]), choice[:, 0]
    accepted = (choice[:, :-1] == draft.tokens).long().cumprod(1).sum(1)
    return accepted, choice.gather(1, accepted[:, None]).squeeze(1)


def accept(p: Tensor, draft: Draft | None, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Verify a draft against the target's distributions.

    p [B, n+1, V]: fp32, at t_0..t_n. noise [B, n+1]: uniforms, n for the drafts and the last for the bonus.
    Draft y_i is accepted with probability min(1, p_i(y_i)/q_i(y_i)) while all before it were. Returns (accepted r [B],
    bonus b [B]): b is drawn from norm(max(p - q, 0)) at the first rejection, from p after full acceptance. The committed
    tokens are distributed as the target's own (Leviathan et al. 2023, algorithm 1); with one-hot p and q this is greedy.
    """
    if draft is None:
        return torch.zeros_like(p[:, 0, 0], dtype=torch.long), draw(p[:, 0], noise[:, -1])
    p_draft, q_draft = (x.gather(2, draft.tokens[..., None]).squeeze(2) for x in (p[:, :-1], draft.q))
    kept = noise[:, :-1] * q_draft < p_draft
    accepted = kept.long().cumprod(1).sum(1)
    at = accepted[:, None, None].expand(-1, 1, p.shape[2])
    q_or_nothing = torch.cat([draft.q, torch.zeros_like(draft.q[:, :1])], dim=1)
    return accepted, draw(residual(p.gather(1, at), q_or_nothing.gather(1, at)).squeeze(1), noise[:, -1])


def residual(p: Tensor, q: Tensor) -> Tensor:
    """norm(max(p - q, 0)) over the last dimension; p itself where p and q agree to the last bit."""
    left = (p - q).clamp(min=0)
    mass = left.sum(-1, keepdim=True)
    return torch.where(mass > 0, left / mass, p)
