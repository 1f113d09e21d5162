"""The acceptance rule: known τ with stub drafters, and losslessness at T=1 by chi-square for every schedule."""

import numpy as np
import pytest
import torch
from conftest import counting_target, make_drafter, make_target
from scipy.stats import chi2

import mdflash.decoding.acceptance as acceptance
from mdflash import decode
from mdflash.decoding.types import Draft
from mdflash.drafter.sampling import Sampling, draw

SAMPLES, BATCH = 200_000, 25_000


def stub(drafter, right: int):
    """Make the head draft the counting target's own continuation for the first `right` slots, and miss after."""

    def draft(base_logits, first_token, hidden, noise, sampling, alternatives=0):
        d, vocab = base_logits.shape[1:]
        steps = torch.arange(1, d + 1)
        tokens = (first_token[:, None] + steps + (steps > right)) % vocab
        return tokens, torch.nn.functional.one_hot(tokens, vocab).float(), None

    drafter.markov_head.draft = draft
    return drafter


@pytest.mark.parametrize("method", ["dspark", "dpara"])
@pytest.mark.parametrize(("right", "tau"), [(0, 1.0), (1, 2.0), (2, 3.0), (3, 4.0)])
def test_stub_drafters_have_known_tau(method, right, tau):
    target = counting_target()
    drafter = stub(make_drafter(target, d=3, taps=(-1, 0, 1)), right)
    budget = 1 + 12  # the prefill's token belongs to no round
    results = decode(target, drafter, [[3, 4], [7], [1, 2, 3]], method, budget, stop_ids=[], batch_size=2)
    for result, last in zip(results, (4, 7, 3), strict=True):
        assert list(result.token_ids) == [(last + 1 + i) % 32 for i in range(budget)]
        assert result.tau == tau
        assert [r.accepted for r in result.rounds] == [right] * int(12 / tau)
        assert all(r.proposed == 3 and not r.fallback for r in result.rounds)
        assert [r.cold_start for r in result.rounds] == [True] + [False] * (len(result.rounds) - 1)


def test_draw_follows_the_cdf_and_skips_impossible_tokens():
    p = torch.tensor([[0.0, 0.5, 0.0, 0.5, 0.0]]).expand(4, -1)
    assert draw(p, torch.tensor([0.0, 0.49, 0.51, 1 - 2**-24])).tolist() == [1, 1, 3, 3]


def test_rule_by_hand():
    p = torch.tensor([[[0.5, 0.5, 0.0], [0.2, 0.3, 0.5]]])
    draft = Draft(torch.tensor([[0]]), torch.tensor([[[0.8, 0.1, 0.1]]]))
    # accepted with probability 0.5 / 0.8 = 0.625; the residual is all on token 1
    for noise, r, bonus in (([0.62, 0.9], 1, 2), ([0.63, 0.0], 0, 1), ([0.63, 0.99], 0, 1)):
        accepted, token = acceptance.accept(p, draft, torch.tensor([noise]))
        assert (accepted.item(), token.item()) == (r, bonus)


def test_greedy_needs_no_one_hot_distributions():
    """The short greedy rule equals the one rule on one-hot p and q, for drafts that are right 0 to n times."""
    torch.manual_seed(0)
    logits, greedy = torch.randn(64, 4, 9), Sampling()
    tokens = torch.where(torch.rand(64, 3) < 0.7, logits[:, :-1].argmax(-1), torch.randint(9, (64, 3)))
    one_hot = Draft(tokens, torch.nn.functional.one_hot(tokens, 9).float())
    expected = acceptance.accept(greedy.distribution(logits), one_hot, torch.rand(64, 4))
    found = acceptance.decide(logits, Draft(tokens), None, greedy)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))
    assert set(found[0].tolist()) == {0, 1, 2, 3}
    alone = acceptance.decide(logits[:, :1], None, None, greedy)
    assert torch.equal(alone[1], logits[:, 0].argmax(-1))


@pytest.mark.parametrize(
    ("top_k", "top_p", "kept"), [(2, 1.0, 2), (0, 0.6, 2), (0, 0.4, 1), (3, 0.99, 3), (99, 1.0, 4)]
)
def test_filters(top_k, top_p, kept):
    p = Sampling(1.0, top_k, top_p).distribution(torch.tensor([0.5, 0.3, 0.15, 0.05]).log())
    assert (p > 0).sum() == kept
    assert p.sum() == pytest.approx(1.0)


@pytest.mark.parametrize("temperature", [1e-38, 1e-3])
def test_a_tiny_temperature_is_nearly_greedy(temperature):
    p = Sampling(temperature).distribution(torch.tensor([[1.0, 3.0, 2.0]]))
    assert p.tolist() == [[0.0, 1.0, 0.0]]


def sharp_pair(rank: int = 8):
    target = make_target(vocab=8, hidden=16, layers=3, sharpness=1.5)
    return target, make_drafter(target, d=2, taps=(0, 1), rank=rank)


def exact_joint(target, prompt, sampling) -> np.ndarray:
    """The target's distribution over the next four tokens, [8^4], by enumerating every prefix."""
    joint, prefixes = torch.ones(1), torch.tensor([prompt])
    for _ in range(4):
        with torch.no_grad():
            p = sampling.distribution(target.logits(target.forward(prefixes).hidden[:, -1]))
        joint = (joint[:, None] * p).flatten()
        prefixes = torch.cat([prefixes.repeat_interleave(8, 0), torch.arange(8).repeat(len(prefixes))[:, None]], 1)
    return joint.double().numpy()


def chi_square_p(tokens: np.ndarray, expected: np.ndarray) -> float:
    """p-value of observed four-token draws; cells expecting fewer than 5 are pooled."""
    observed = np.bincount(tokens @ np.array([512, 64, 8, 1]), minlength=4096).astype(float)
    counts = expected * len(tokens)
    rare = counts < 5
    observed = np.append(observed[~rare], observed[rare].sum())
    counts = np.append(counts[~rare], counts[rare].sum())
    if counts[-1] < 1e-9:
        assert observed[-1] == 0
        observed, counts = observed[:-1], counts[:-1]
    return float(chi2.sf(((observed - counts) ** 2 / counts).sum(), len(counts) - 1))


def draws(target, drafter, method, samples=SAMPLES, **sampling) -> np.ndarray:
    prompts = [[1, 5, 2]] * samples
    results = decode(
        target, drafter, prompts, method, 4, temperature=1.0, stop_ids=[], batch_size=BATCH, seed=5, **sampling
    )
    return np.array([result.token_ids for result in results])


@pytest.mark.slow
@pytest.mark.parametrize("method", ["autoregressive", "dspark", "dflash", "dpara"])
def test_sampling_is_lossless(method):
    target, drafter = sharp_pair(rank=0 if method == "dflash" else 8)
    expected = exact_joint(target, [1, 5, 2], Sampling(1.0))
    assert chi_square_p(draws(target, drafter, method), expected) > 1e-3


@pytest.mark.slow
def test_filtered_sampling_is_lossless():
    target, drafter = sharp_pair()
    expected = exact_joint(target, [1, 5, 2], Sampling(1.0, top_k=6, top_p=0.9))
    assert chi_square_p(draws(target, drafter, "dpara", 50_000, top_k=6, top_p=0.9), expected) > 1e-3


@pytest.mark.slow
def test_sampling_beyond_the_paper_is_lossless():
    """Features in flight and guessed bonuses change which drafts are made, never what is drawn."""
    target, drafter = sharp_pair()
    expected = exact_joint(target, [1, 5, 2], Sampling(1.0))
    settings = {"in_flight_taps": 1, "bonus_guesses": 2}
    assert chi_square_p(draws(target, drafter, "dpara", 50_000, **settings), expected) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("method", ["dspark", "dpara"])
def test_a_broken_residual_fails_the_test(method, monkeypatch):
    monkeypatch.setattr(acceptance, "residual", lambda p, q: p)
    target, drafter = sharp_pair()
    expected = exact_joint(target, [1, 5, 2], Sampling(1.0))
    assert chi_square_p(draws(target, drafter, method, 50_000), expected) < 1e-3
