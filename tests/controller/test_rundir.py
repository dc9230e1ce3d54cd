"""A run's folder: its name, what is read back from it, who may write there."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from shardloop.controller.manifest import (
    CHANGEABLE,
    add_resumption,
    changed_settings,
    flat_settings,
    read_config,
    write_manifest,
)
from shardloop.controller.rundir import RunFolder, create_run_folder, planned_run_folder
from shardloop.errors import CheckpointError, UsageError
from shardloop.metrics import read_jsonl
from shardloop.presets import PRESETS

TINY = PRESETS["tiny"]


def test_a_second_run_without_a_name_is_numbered_and_a_named_one_refused(tmp_path: Path) -> None:
    config = replace(TINY, out=tmp_path)
    names = [create_run_folder(config, label="tiny").root.name for _ in range(3)]
    assert names == ["tiny-seed0", "tiny-seed0-2", "tiny-seed0-3"]
    assert planned_run_folder(config, label="tiny") == tmp_path / "tiny-seed0-4"
    named = replace(config, name="mine")
    create_run_folder(named, label="tiny")
    with pytest.raises(UsageError, match="mine exists; choose another --name"):
        create_run_folder(named, label="tiny")


def test_a_folder_can_be_given_as_text() -> None:
    assert RunFolder("runs/mine").metrics == Path("runs/mine/metrics.jsonl")
    assert RunFolder("runs/mine") == RunFolder(Path("runs/mine"))


@pytest.mark.parametrize("tail", ['{"step": 2, "rew', '{"step"', "{", '{"step": 2, "a": "é'])
def test_a_last_line_that_was_cut_off_is_dropped(tmp_path: Path, tail: str) -> None:
    folder = RunFolder(tmp_path)
    whole = b'{"step": 1}\n'
    folder.metrics.write_bytes(whole + tail.encode()[: len(tail)])
    assert read_jsonl(folder.metrics) == [{"step": 1}]
    folder.forget_after(1)
    assert folder.metrics.read_bytes() == whole, "else the next line would be glued to it"


def test_a_last_line_that_lacks_only_its_end_is_kept(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.metrics.write_text('{"step": 1}\n{"step": 2}')
    folder.forget_after(2)
    assert folder.metrics.read_text() == '{"step": 1}\n{"step": 2}\n'


@pytest.mark.parametrize("line", [b"{", b"[1]", b"3", b"\xff\xfe", b"\0\0\0", b'{"a": 1'])
def test_any_other_damaged_line_is_named_by_file_and_number(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n' + line + b'\n{"step": 3}\n')
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl:2 is damaged"):
        read_jsonl(path)


def test_a_record_without_its_step_is_damage(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.evals.write_text('{"greedy": 1}\n')
    with pytest.raises(CheckpointError, match=r"evals\.jsonl is damaged"):
        folder.forget_after(1)


def test_a_lock_is_held_against_other_processes_and_ends_with_its_holder(tmp_path: Path) -> None:
    program = (
        "import fcntl, sys; lock = open(sys.argv[1], 'w');"
        "fcntl.flock(lock, fcntl.LOCK_EX); print('locked', flush=True); sys.stdin.read()"
    )
    folder = RunFolder(tmp_path)
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path / ".lock")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as other:
        assert other.stdout is not None and other.stdout.readline() == b"locked\n"
        with pytest.raises(UsageError, match="another process is running in"), folder.locked():
            pass
        other.kill()
    with folder.locked():
        pass


def test_what_a_failed_start_made_goes_and_what_others_put_there_stays(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.demand_new()
    (folder.root / "notes.txt").write_text("mine")
    with pytest.raises(ValueError), folder.locked(), folder.removed_if_barren():
        write_manifest(folder.manifest, TINY, {})
        (folder.root / "tiny").mkdir()
        folder.start.mkdir()
        folder.evals.write_text('{"step": 0}\n')
        raise ValueError
    assert [path.name for path in folder.root.iterdir()] == ["notes.txt"]


def test_settings_in_force_are_the_first_with_all_changes(tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    write_manifest(path, TINY, {"reward": "exact"})
    assert read_config(path) == TINY
    first = replace(TINY, steps=200, trainer=replace(TINY.trainer, layout="fsdp=1"))
    changes = changed_settings(TINY, first)
    assert changes == {"steps": 200, "trainer.layout": "fsdp=1"}
    add_resumption(path, changes, from_step=50)
    second = replace(first, workers=replace(first.workers, timeout_s=9.0))
    add_resumption(path, changed_settings(read_config(path), second), from_step=60)
    assert read_config(path) == second
    record = json.loads(path.read_text())
    assert record["config"]["steps"] == TINY.steps
    assert [entry["from_step"] for entry in record["resumed"]] == [50, 60]
    assert list(tmp_path.iterdir()) == [path], "no temporary file is left"


def test_what_a_run_learns_from_cannot_change() -> None:
    other = replace(
        TINY,
        seed=7,
        sampling=replace(TINY.sampling, top_p=0.5),
        optim=replace(TINY.optim, lr=1.0),
        steps=3,
    )
    with pytest.raises(UsageError) as caught:
        changed_settings(TINY, other)
    for told in ("seed=7 (the run has 0)", "sampling.top-p=0.5", "optim.lr=1.0"):
        assert told in str(caught.value)
    assert "steps" not in str(caught.value)


def test_changeable_settings_exist() -> None:
    assert set(CHANGEABLE) <= set(flat_settings(TINY))


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"config": {"stepz": 1}}', '{"config": {}, "resumed": [3]}']
)
def test_what_is_no_manifest_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "manifest.json"
    path.write_text(text)
    with pytest.raises(UsageError, match=r"manifest\.json is not a run's manifest"):
        read_config(path)
