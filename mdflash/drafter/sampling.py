"""From logits to the distribution that is really sampled from. Both sides of speculative decoding use it."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """temperature 0 is greedy. top_k 0 and top_p 1.0 keep every token. The filters apply to target and draft alike, so
    that decoding stays lossless with respect to the target's filtered distribution."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self):
        if not self.temperature >= 0:
            raise ValueError(f"temperature={self.temperature}: use 0 for greedy or a positive number")
        if self.top_k < 0:
            raise ValueError(f"top_k={self.top_k}: use 0 to keep every token or a positive count")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p}: use a probability mass in (0, 1]")

    @property
    def greedy(self) -> bool:
        """Whether every distribution is one-hot at the argmax."""
        return self.temperature == 0

    def distribution(self, logits: Tensor) -> Tensor:
        """fp32 probabilities [..., V] of logits [..., V]: one-hot at the argmax when greedy."""
        logits = logits.float()
        if self.greedy:
            return torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
        logits = (logits - logits.amax(-1, keepdim=True)) / self.temperature  # no overflow at tiny temperatures
        if 0 < self.top_k < logits.shape[-1]:
            kth = logits.topk(self.top_k, dim=-1).values[..., -1:]
            logits = logits.masked_fill(logits < kth, float("-inf"))
        probabilities = logits.softmax(-1)
        if self.top_p < 1:
            ranked, order = probabilities.sort(dim=-1, descending=True)
            kept = ranked.cumsum(-1) - ranked < self.top_p  # the token that crosses the mass is kept
            ranked = torch.where(kept, ranked, 0.0)
            probabilities = torch.zeros_like(probabilities).scatter_(-1, order, ranked)
            probabilities = probabilities / probabilities.sum(-1, keepdim=True)
        return probabilities


def draw(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """Inverse-CDF draw: probabilities [..., V], uniform [...] in [0, 1) -> token ids [...].

    The same uniform always gives the same token, which is what makes a request's tokens independent of its batch. A token of
    probability 0 is never drawn.
    """
    cdf = probabilities.double().cumsum(-1)
    point = uniform.double()[..., None] * cdf[..., -1:]
    token = torch.searchsorted(cdf, point, right=True).squeeze(-1)
    last = probabilities.shape[-1] - 1 - (probabilities > 0).flip(-1).to(torch.uint8).argmax(-1)
    return torch.minimum(token, last)
