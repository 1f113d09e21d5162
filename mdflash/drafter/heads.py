"""The autoregressive (Markov) heads and the confidence head of a drafter. Shape legend: tree.py.

Slot i (1..d) has base logits l_i and hidden state h_i; the head turns them into z_i = l_i + bias(y_{i-1}, h_i), where
y_0 is the bonus token (DSpark paper; docs/checkpoint.md). All heads share one interface: `start` gives the carried state,
`step` one slot's code, `bias` = W2·code. Teacher-forced training and drafting both walk the slots with them.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from .sampling import Sampling, draw


class MarkovHead(nn.Module):
    """What the heads share; by itself the head of a rank-0 checkpoint (DFlash): no bias, no parameters."""

    def start(self, batch: torch.Size, like: Tensor) -> Tensor | None:
        """The state carried over the slots before the first one; None where the head carries none."""
        return None

    def step(self, previous: Tensor, hidden: Tensor | None, state: Tensor | None):
        """One slot: previous tokens [...], hidden [..., C] -> (code [..., rank], whose bias is W2·code, or None; next
        state)."""
        return None, state

    def bias(self, code: Tensor | None) -> Tensor | float:
        """The bias [..., V] of a code [..., rank]; 0 without a head."""
        return 0.0 if code is None else self.markov_w2(code)

    def codes(self, previous: Tensor, hidden: Tensor | None) -> Tensor | None:
        """Teacher-forced codes of all d slots. previous: y_0..y_{d-1} [..., d]; hidden [..., d, C] -> [..., d, rank]."""
        state, steps = self.start(previous.shape[:-1], previous), []
        for i in range(previous.shape[-1]):
            code, state = self.step(previous[..., i], None if hidden is None else hidden[..., i, :], state)
            steps.append(code)
        return None if steps[0] is None else torch.stack(steps, dim=-2)

    def biases(self, previous: Tensor, hidden: Tensor | None) -> Tensor | float:
        """Teacher-forced biases [..., d, V] of all d slots; arguments as for `codes`."""
        return self.bias(self.codes(previous, hidden))

    def draft(
        self, base_logits: Tensor, first_token: Tensor, hidden: Tensor | None, noise: Tensor | None, sampling: Sampling,
        alternatives: int = 0,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
        """d sequential steps from y_0. base_logits [B,d,V], first_token [B], hidden [B,d,C], noise [B,d] uniforms (unread when
        greedy).

        Returns tokens [B,d], q [B,d,V], the fp32 distributions the tokens were drawn from (None when greedy: one-hot), and
        the `alternatives` likeliest others of every slot [B,d,alternatives] (None for 0).
        """
        previous, state, tokens, qs, others = first_token, self.start(first_token.shape, first_token), [], [], []
        for i in range(base_logits.shape[1]):
            code, state = self.step(previous, None if hidden is None else hidden[:, i], state)
            logits = base_logits[:, i].float() + self.bias(code)
            if sampling.greedy:
                previous = logits.argmax(-1)
            else:
                qs.append(sampling.distribution(logits))
                previous = draw(qs[-1], noise[:, i])
            tokens.append(previous)
            if alternatives:
                others.append(logits.scatter(1, previous[:, None], float("-inf")).topk(alternatives).indices)
        return tuple(torch.stack(parts, 1) if parts else None for parts in (tokens, qs, others))

    def sample(
        self,
        base_logits: Tensor,
        first_token: Tensor,
        temperature: float,
        hidden: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Draft d tokens from base logits [B,d,V] after `first_token` [B] (the bonus).

        hidden [B,d,C] is needed by gated and rnn heads. Returns (tokens [B,d] int64, q [B,d,V] fp32): q is the very
        distribution sampled from, one-hot at temperature 0, so that verification against it is lossless.
        """
        if hidden is None and isinstance(self, GatedHead | RNNHead):
            raise ValueError(f"{type(self).__name__} reads the slots' hidden states: pass hidden=[B,d,hidden]")
        device = generator.device if generator is not None else base_logits.device
        noise = torch.rand(base_logits.shape[:2], generator=generator, device=device).to(base_logits.device)
        tokens, q, _ = self.draft(base_logits, first_token, hidden, noise, Sampling(temperature))
        return tokens, one_hot(tokens, base_logits.shape[-1]).float() if q is None else q


class VanillaHead(MarkovHead):
    """bias = W2 · W1[y]."""

    def __init__(self, vocab_size: int, rank: int, hidden_size: int):
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, vocab_size, bias=False)

    def step(self, previous, hidden, state):
        return self.markov_w1(previous), state

    def codes(self, previous, hidden):
        return self.step(previous, hidden, None)[0]  # nothing is carried, so all slots go at once


class GatedHead(VanillaHead):
    """bias = W2 · (σ(G[h ; e]) ⊙ e), e = W1[y]."""

    def __init__(self, vocab_size: int, rank: int, hidden_size: int):
        super().__init__(vocab_size, rank, hidden_size)
        self.gate_proj = nn.Linear(hidden_size + rank, rank)

    def step(self, previous, hidden, state):
        e = self.markov_w1(previous)
        gate = torch.sigmoid(self.gate_proj(torch.cat([hidden.to(e.dtype), e], dim=-1)))
        return gate * e, state


class RNNHead(VanillaHead):
    """[g ; c ; o] = J[s ; e ; h], s <- σ(g)⊙s + (1-σ(g))⊙tanh(c), bias = W2 · tanh(o); s starts at 0."""

    def __init__(self, vocab_size: int, rank: int, hidden_size: int):
        super().__init__(vocab_size, rank, hidden_size)
        self.joint_proj = nn.Linear(2 * rank + hidden_size, 3 * rank)

    codes = MarkovHead.codes  # slot by slot: the state is carried

    def start(self, batch, like):
        return self.markov_w1.weight.new_zeros((*batch, self.markov_w1.embedding_dim))

    def step(self, previous, hidden, state):
        e = self.markov_w1(previous)
        joint = self.joint_proj(torch.cat([state.to(e.dtype), e, hidden.to(e.dtype)], dim=-1))
        gate, candidate, out = joint.chunk(3, dim=-1)
        gate = torch.sigmoid(gate)
        return torch.tanh(out), gate * state + (1 - gate) * torch.tanh(candidate)


HEADS = {"vanilla": VanillaHead, "gated": GatedHead, "rnn": RNNHead}


class ConfidenceHead(nn.Module):
    """Predicts that slot i's draft is accepted: a logit w·[h_i ; W1[y_{i-1}]] + c (the embedding only when configured)."""

    def __init__(self, hidden_size: int, markov_rank: int):
        super().__init__()
        self.proj = nn.Linear(hidden_size + markov_rank, 1)

    def forward(self, hidden: Tensor, previous_embedding: Tensor | None = None) -> Tensor:
        """hidden [..., C], previous_embedding [..., rank] or None -> confidence logits [...]."""
        inputs = hidden if previous_embedding is None else torch.cat([hidden, previous_embedding], dim=-1)
        return self.proj(inputs).squeeze(-1)
