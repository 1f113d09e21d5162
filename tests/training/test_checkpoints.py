"""Checkpoints are whole or absent: chosen, named when torn, thinned, swept."""

from pathlib import Path

import pytest

from mdflash.training.checkpoints import ASIDE, fault, newest_first, newest_whole, publish, sweep, write_whole


def write_checkpoint(folder, step, keep=2):
    written = folder / ASIDE / f"checkpoint-{step}"
    (written / "global_step").mkdir(parents=True)
    (written / "model.safetensors").write_bytes(b"x" * 100)
    (written / "global_step" / "shard.pt").write_bytes(b"y" * 10)
    publish(written, keep)


def test_the_newest_whole_checkpoint_is_chosen_and_torn_ones_are_named(tmp_path, capsys):
    assert newest_whole(tmp_path) is None
    for step in (9, 10, 11):
        write_checkpoint(tmp_path, step, keep=5)
    (tmp_path / "checkpoint-11" / "model.safetensors").write_bytes(b"x" * 60)
    (tmp_path / "checkpoint-10" / "global_step" / "shard.pt").unlink()
    assert newest_whole(tmp_path) == tmp_path / "checkpoint-9"
    said = capsys.readouterr().out
    assert "checkpoint-11 is torn (model.safetensors has 60 of 100 bytes)" in said
    assert "checkpoint-10 is torn (global_step/shard.pt is missing)" in said


def test_the_limit_counts_whole_checkpoints_only(tmp_path):
    for step in (2, 4, 6):
        write_checkpoint(tmp_path, step)
    assert [path.name for path in newest_first(tmp_path)] == ["checkpoint-6", "checkpoint-4"]
    for step in (8, 10):
        (tmp_path / f"checkpoint-{step}").mkdir()  # torn and newer
    write_checkpoint(tmp_path, 8)  # in the torn one's place
    assert [path.name for path in newest_first(tmp_path)] == ["checkpoint-8", "checkpoint-6"]
    assert all(fault(path) is None for path in newest_first(tmp_path))


def test_an_interrupted_save_leaves_no_name_and_is_swept(tmp_path, monkeypatch):
    write_checkpoint(tmp_path, 2)
    monkeypatch.setattr(Path, "rename", lambda *_: pytest.fail("killed before the rename"))
    with pytest.raises(pytest.fail.Exception):
        write_checkpoint(tmp_path, 4)
    monkeypatch.undo()
    assert [path.name for path in newest_first(tmp_path)] == ["checkpoint-2"]
    sweep(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-2"]


def test_a_file_is_whole_or_absent(tmp_path, monkeypatch):
    write_whole(tmp_path / "a.json", "old")
    monkeypatch.setattr("mdflash.training.checkpoints.os.replace", lambda *_: pytest.fail("killed before the rename"))
    with pytest.raises(pytest.fail.Exception):
        write_whole(tmp_path / "a.json", "new")
    assert (tmp_path / "a.json").read_text() == "old"


@pytest.mark.parametrize("seal", ["[]", "null", "{}", "{"])
def test_an_unreadable_seal_is_a_torn_checkpoint(tmp_path, seal):
    checkpoint = tmp_path / "checkpoint-3"
    checkpoint.mkdir()
    (checkpoint / "sealed.json").write_text(seal)
    assert fault(checkpoint) == "no readable sealed.json"
