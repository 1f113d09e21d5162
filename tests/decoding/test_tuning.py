"""`auto`: the pair with most expected tokens per ms, among those that the drafter was trained for."""

import pytest
from conftest import make_drafter, make_target

from mdflash import decode
from mdflash.decoding import tuning
from mdflash.decoding.deployment import AUTO, Deployment

BEYOND = {"in_flight_taps": [0, 1, 2], "known_bonus": 0.5}


def drafter_trained_for(beyond: dict | None):
    target = make_target()
    drafter = make_drafter(
        target, num_target_layers=10, taps=(0, 4, 7), mdflash_config=beyond and {"beyond_the_paper": beyond}
    )
    return drafter


def chosen(monkeypatch, steps, beyond=BEYOND, taps=AUTO, guesses=AUTO):
    """The pair that `settle` picks when a step takes steps(taps, guesses)."""
    monkeypatch.setattr(tuning, "step_s", lambda pair: steps(pair.in_flight_taps, pair.bonus_guesses))
    asked = Deployment(in_flight_taps=taps, bonus_guesses=guesses)
    found = tuning.settle(asked, drafter_trained_for(beyond), 1, build=lambda pair: pair)
    return found.in_flight_taps, found.bonus_guesses


def test_the_latest_and_most_win_while_they_hide(monkeypatch):
    assert chosen(monkeypatch, lambda taps, guesses: 1.0) == (2, 4)


def test_what_no_longer_hides_loses(monkeypatch):
    assert chosen(monkeypatch, lambda taps, guesses: 1.0 + 0.2 * (taps == 2) + 0.1 * (guesses > 1)) == (1, 1)
    assert chosen(monkeypatch, lambda taps, guesses: 1.0 + taps + guesses) == (0, 0)


def test_a_stated_setting_stays_and_an_untrained_one_is_off(monkeypatch):
    assert chosen(monkeypatch, lambda taps, guesses: 1.0, taps=1) == (1, 4)
    assert chosen(monkeypatch, lambda taps, guesses: 1.0, guesses=3) == (2, 3)
    assert chosen(monkeypatch, lambda taps, guesses: 1.0, beyond=None) == (0, 0)
    assert chosen(monkeypatch, lambda taps, guesses: 1.0, beyond={"in_flight_taps": [0, 1], "known_bonus": 0.0}) == (
        1,
        0,
    )


def test_a_count_beyond_the_drafters_taps_is_refused(monkeypatch):
    with pytest.raises(ValueError, match="in_flight_taps=4: this drafter has 3 taps"):
        chosen(monkeypatch, lambda taps, guesses: 1.0, taps=4)


def test_a_batch_size_is_measured_once(monkeypatch):
    timed = []
    monkeypatch.setattr(tuning, "step_s", lambda pair: timed.append(pair) or 1.0)
    drafter, asked = drafter_trained_for(BEYOND), Deployment(in_flight_taps=AUTO)
    for batch, pairs in ((1, 3), (1, 3), (8, 6)):
        assert tuning.settle(asked, drafter, batch, build=lambda pair: pair).in_flight_taps == 2
        assert len(timed) == pairs


def test_shares_between_the_measured_depths(monkeypatch):
    """At a measured depth its own share, between two a part of each, beyond the deepest that one's."""
    monkeypatch.setattr(
        tuning, "SHARES", ((0.0, {0: 0.8, 1: 0.85, 2: 0.87, 4: 0.88}), (0.5, {0: 0.9, 1: 0.92, 2: 0.94, 4: 0.96}))
    )
    drafter = drafter_trained_for(BEYOND)  # taps behind 1, 5 and 8 of 10 layers
    share = lambda taps, guesses: tuning.expected_share(drafter, Deployment(in_flight_taps=taps, bonus_guesses=guesses))  # noqa: E731
    assert share(0, 0) == pytest.approx(0.8)
    assert share(1, 0) == pytest.approx(0.8 + 0.1 * 0.1 / 0.5)
    assert share(2, 1) == pytest.approx(0.92)
    assert share(3, 4) == pytest.approx(0.96)
    assert share(0, 3) == pytest.approx(0.87)  # what 2 guesses give


def test_auto_decodes_and_measures(target):
    """On a real schedule: the answer is the autoregressive one, whatever is picked."""
    drafter = make_drafter(target, mdflash_config={"beyond_the_paper": BEYOND})
    asked = dict(max_new_tokens=16, stop_ids=[], batch_size=2)
    prompts = [[1, 2, 3], [4, 5]]
    expected = [r.token_ids for r in decode(target, drafter, prompts, "autoregressive", **asked)]
    found = decode(target, drafter, prompts, in_flight_taps=AUTO, bonus_guesses=AUTO, **asked)
    assert [r.token_ids for r in found] == expected
    with pytest.raises(ValueError, match="state both"):
        decode(target, drafter, prompts, in_flight_taps=AUTO, drafter_address="127.0.0.1:29600", **asked)
