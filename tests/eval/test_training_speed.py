"""What the training benchmark counts and how it keeps its file; its figures need a GPU."""

import json

import pytest
import torch

from eval.training_speed import main, merge


def test_scaling_compares_the_same_zero_stage(tmp_path):
    file, made_by = tmp_path / "speed.json", {"command": "c", "revision": "r"}
    merge(file, {"peak_gb": 3.0, "ms": {"a": 1}}, made_by, engine=False)
    merge(file, {"peak_gb": 4.0, "ms": {"b": 2}}, made_by, engine=False)
    for name, rate in (("zero1_1gpu", 2.0), ("zero2_1gpu", 1.0), ("zero1_2gpu", 3.8), ("zero2_2gpu", 1.9)):
        merge(file, {name: {"samples_per_s": rate}}, made_by, engine=True)
    held = json.loads(file.read_text())
    assert held["scaling_2gpu_by_stage"] == {"zero1_2gpu": 1.9, "zero2_2gpu": 1.9}
    assert held["scaling_2gpu"] == 1.9
    assert held["peak_gb"] == 4.0
    assert held["ms"] == {"a": 1, "b": 2}
    assert held["engine"]["zero1_2gpu"]["revision"] == "r"
    merge(file, {"ms": {"c": 3}}, made_by | {"revision": "newer"}, engine=False)
    held = json.loads(file.read_text())
    assert held["ms"] == {"c": 3}  # figures of another revision do not stay under the new one's name
    assert "peak_gb" not in held
    assert len(held["engine"]) == 4


@pytest.mark.skipif(torch.cuda.is_available(), reason="it would measure")
def test_without_a_gpu_it_says_so(capsys):
    with pytest.raises(SystemExit, match="no GPU here"):
        main(["--config", "recipes/tiny.yaml", "--output", "never.json"])
