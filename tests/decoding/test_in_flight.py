"""In-flight features and guessed bonuses: lossless, the same on every runner, equal to the offline replay."""

import pytest
import torch
from conftest import make_drafter, make_target

from eval.replay import Setting, comparable, replay
from mdflash import decode
from mdflash.decoding.drafter_runner import Branches, first_slots, guess_bonuses
from mdflash.decoding.drafting_side import DraftingSide

PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8], [9] * 12, [10], list(range(20, 60))]
BEYOND = [
    (1, 0, "spine"),
    (3, 0, "spine"),
    (0, 1, "spine"),
    (1, 2, "spine"),
    (0, 3, "draft"),
    (2, 2, "spine"),
    (2, 2, "draft"),
]


@pytest.mark.parametrize(("taps", "guesses", "source"), BEYOND)
@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
def test_greedy_stays_token_exact(taps, guesses, source, head):
    target = make_target()
    drafter = make_drafter(target, head=head)
    asked = dict(max_new_tokens=24, stop_ids=[], batch_size=3, devices="cpu,cpu")
    expected = [r.token_ids for r in decode(target, drafter, PROMPTS, "autoregressive", **asked)]
    for extra in ({}, {"head_device": "target"}, {"lm_head": "all"}):
        found = decode(
            target, drafter, PROMPTS, in_flight_taps=taps, bonus_guesses=guesses, guess_source=source, **asked, **extra
        )
        assert [r.token_ids for r in found] == expected
        assert not any(x.fallback for r in found for x in r.rounds)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("taps", "guesses", "source"), BEYOND)
def test_the_fast_runner_makes_the_same_rounds(taps, guesses, source, temperature):
    target = make_target(hidden=64, head_dim=16)
    drafter = make_drafter(target)
    asked = dict(max_new_tokens=24, temperature=temperature, stop_ids=[5], batch_size=2, seed=5)
    asked |= {"in_flight_taps": taps, "bonus_guesses": guesses, "guess_source": source}
    runs = [decode(target, drafter, PROMPTS, runner=runner, **asked) for runner in ("eager", "fast")]
    assert [(r.token_ids, r.rounds) for r in runs[0]] == [(r.token_ids, r.rounds) for r in runs[1]]


def test_none_of_either_is_the_papers_decoder(target, drafter):
    asked = dict(max_new_tokens=24, stop_ids=[], batch_size=3)
    plain, off = (
        decode(target, drafter, PROMPTS, **asked, **x) for x in ({}, {"in_flight_taps": 0, "bonus_guesses": 0})
    )
    assert [r.rounds for r in plain] == [r.rounds for r in off]
    assert not any(x.guessed for r in plain for x in r.rounds)


@pytest.mark.parametrize(("taps", "guesses", "source"), [(0, 0, "spine"), *BEYOND])
def test_live_rounds_equal_the_offline_replay(taps, guesses, source):
    """A cache-free replay on the answers makes the same drafts, guesses the same bonuses and accepts as much."""
    target = make_target()
    drafter = make_drafter(target)
    for method in ("dpara", "dspark"):
        settings = (
            {"in_flight_taps": taps, "bonus_guesses": guesses, "guess_source": source} if method == "dpara" else {}
        )
        live = decode(target, drafter, PROMPTS, method, 30, stop_ids=[], batch_size=3, **settings)
        setting = Setting(serial=True) if method == "dspark" else Setting(False, taps, guesses, guess_source=source)
        (found,) = replay(target, drafter, PROMPTS, [r.token_ids for r in live], [setting])
        for result, rounds in zip(live, found, strict=True):
            assert comparable(result.rounds) == comparable(rounds)
    assert not any(x.guessed for r in found for x in r)  # serial rounds guess nothing


def test_a_right_guess_picks_its_branch():
    """Hand-made: r = 1, guesses (5, 7) for it; bonus 7 takes the second guess's branch, bonus 6 the open one."""
    guesses = torch.tensor([[[1, 2], [5, 7]]]).expand(3, -1, -1)
    outcome = torch.tensor([[1, 7, 0], [1, 6, 0], [0, 1, 0]])
    branch, hit = Branches(torch.zeros(3, 6, 1, 1), None, guesses).chosen(outcome)
    assert branch.tolist() == [5, 3, 1]
    assert hit.tolist() == [True, False, True]
    assert first_slots(guesses, 9)[0, 0].tolist() == [9, 1, 2, 9, 5, 7]


@torch.no_grad()
def test_guesses_are_the_spines_likeliest_but_the_rejected(drafter):
    torch.manual_seed(0)
    spine, tokens = torch.randn(2, 4, drafter.config.hidden_size), torch.randint(90, (2, 4))
    found = guess_bonuses(drafter, spine, tokens, 3)
    logits = drafter.lm_head(spine) + drafter.head.bias(drafter.head.step(tokens, spine, None)[0])
    for b in range(2):
        for r in range(4):
            ranked = logits[b, r].argsort(descending=True).tolist()
            rejected = tokens[b, r + 1].item() if r < 3 else None
            assert found[b, r].tolist() == [x for x in ranked if x != rejected][:3]


@pytest.mark.parametrize("runner", ["eager", "fast"])
@pytest.mark.parametrize(
    ("taps", "source", "seen"), [(0, "spine", 0), (1, "spine", 0), (2, "spine", 1), (2, "draft", 0)]
)
def test_guesses_come_a_tap_before_the_tree(monkeypatch, runner, taps, source, seen):
    """Work reaches the drafting side in the order of the taps, with the features that are there by then."""
    target = make_target(hidden=64, head_dim=16)
    drafter, asked = make_drafter(target), []

    def spying(name):
        work = getattr(DraftingSide, name)

        def spy(self, tokens, start, limit, in_flight, named):
            asked.append((name, 0 if in_flight is None else in_flight.shape[-1] // 64))
            return work(self, tokens, start, limit, in_flight, named)

        return spy

    for name in ("guess", "tree"):
        monkeypatch.setattr(DraftingSide, name, spying(name))
    settings = {"in_flight_taps": taps, "bonus_guesses": 2, "guess_source": source, "runner": runner}
    decode(target, drafter, PROMPTS[:2], max_new_tokens=8, stop_ids=[], **settings)
    assert len(asked) > 2
    assert asked == [("guess", seen), ("tree", taps)] * (len(asked) // 2)


def test_right_guesses_are_reported(target, drafter):
    """With every token a guess, every round after the cold start has guessed its bonus."""
    vocabulary = target.config.vocab_size
    results = decode(target, drafter, PROMPTS[:2], max_new_tokens=12, stop_ids=[], bonus_guesses=vocabulary - 1)
    assert all(x.guessed for r in results for x in r.rounds if not x.cold_start)
    (found,) = replay(target, drafter, PROMPTS[:2], [r.token_ids for r in results], [Setting(bonus_known=True)])
    for result, rounds in zip(results, found, strict=True):
        assert [x.draft for x in result.rounds] == [x.draft for x in rounds]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bonus_guesses": 97}, "97 tokens"),
        ({"in_flight_taps": 9}, "has 3 taps"),
        ({"in_flight_taps": -1}, "use 0"),
        ({"bonus_guesses": 1.5}, "use 0"),
    ],
)
def test_bad_settings_are_refused(target, drafter, settings, message):
    with pytest.raises(ValueError, match=message):
        decode(target, drafter, [[1, 2]], max_new_tokens=4, **settings)
