"""The bench's arithmetic and plots; its timings need a GPU."""

import pytest
import torch

from eval import decoding_speed
from eval.decoding_plots import critical_path, plot_anatomy, plot_batches
from eval.decoding_speed import headline

DPARA = {"step": 6.0, "verify": 5.0, "branch": 0.5, "tree": 1.0, "append": 0.1, "exposed": 1.0, "hidden_share": 1.0}
SERIAL = {"step": 8.0, "verify": 5.0, "append": 0.5, "serial": 1.0, "window": 1.0, "exposed": 3.0}


@pytest.fixture
def found() -> dict:
    ms = {"ar_b1": {"step": 4.0, "verify": 3.9, "exposed": 0.1}, "dspark_b1": SERIAL, "dpara_b1": DPARA}
    ms |= {"dspark_b16": SERIAL, "dpara_b16": DPARA | {"step": 7.0, "hidden_share": 0.5}}
    return {"weight_read_limit_ms": 3.2, "context": 64, "ms": ms}


def test_headline(found):
    figures = headline(found)
    assert figures == {
        "ar_over_limit": 1.25, "verify_over_ar": 1.25, "exposed_ms": 1.0, "dpara_over_ar": 1.5, "dspark_exposed_ms": 3.0,
        "dpara_over_dspark": 0.75, "hidden_share": 1.0, "hidden_share_by_batch": {"b1": 1.0, "b16": 0.5},
        "tap_events_over_verify": None, "b16_dpara_over_dspark": 0.875,
    }  # fmt: skip
    assert headline({"weight_read_limit_ms": 3.2, "ms": {}})["dpara_over_ar"] is None  # nothing has run yet


def test_the_critical_path_adds_up_to_the_step():
    assert critical_path(SERIAL)["links and gaps"] == pytest.approx(0.5)
    assert sum(critical_path(DPARA).values()) == pytest.approx(6.0)
    assert "backbone" not in critical_path(DPARA)  # it runs beside the verify pass


def test_plots(found, tmp_path):
    plot_anatomy(found, tmp_path / "a.png")
    plot_batches(found, tmp_path / "b.png")
    assert all((tmp_path / name).stat().st_size > 1000 for name in ("a.png", "b.png"))


def test_without_a_gpu_it_says_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="no GPU here"):
        decoding_speed.main(["--config", "recipes/qwen3_8b.yaml", "--output", "x.json"])
