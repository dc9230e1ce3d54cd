"""The page of conventions says what the code computes; each convention differs from the next."""

import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from shardloop import config
from shardloop.rl.conventions import Convention, conventions

ROOT = Path(__file__).parents[2]


def of_topic(topic: str) -> list[Convention]:
    return [entry for entry in conventions() if entry.topic == topic]


def test_the_page_is_fresh_and_a_stale_one_is_noticed(tmp_path: Path) -> None:
    command = [sys.executable, "scripts/write_conventions.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (tmp_path / "scripts").mkdir()
    (tmp_path / "docs").mkdir()
    text = (ROOT / "scripts" / "write_conventions.py").read_text(encoding="utf-8")
    (tmp_path / "scripts" / "write_conventions.py").write_text(text, encoding="utf-8")
    page = (ROOT / "docs" / "conventions.md").read_text(encoding="utf-8")
    (tmp_path / "docs" / "conventions.md").write_text(page.replace("0.7071", "0.7072"), "utf-8")
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (done.returncode, "run `make docs`" in done.stderr) == (1, True)


@pytest.mark.parametrize(
    ("topic", "setting", "kinds"),
    [
        ("advantage", "advantage", config.AdvantageKind),
        ("advantage", "std", config.Std),
        ("loss", "loss", config.PolicyLossKind),
        ("aggregation", "aggregation", config.Aggregation),
        ("kl", "kl_estimator", config.KLEstimator),
        ("kl", "kl_in", config.KLPlace),
        ("correction", "correction", config.CorrectionKind),
        ("correction", "correction_mode", config.CorrectionMode),
    ],
)
def test_every_choice_of_the_settings_is_there(topic: str, setting: str, kinds: object) -> None:
    names = [part for entry in of_topic(topic) for part in entry.name.split(", ")]
    shown = {name.partition("=")[2] for name in names if name.startswith(f"{setting}=")}
    assert shown == set(get_args(kinds)) - {"none"} | (shown & {"none"})


def test_no_two_conventions_of_a_topic_have_the_same_numbers() -> None:
    for topic in ("advantage", "loss", "aggregation", "kl", "correction"):
        entries = of_topic(topic)
        numbers = {(entry.value, entry.gradient) for entry in entries}
        assert len(numbers) == len(entries), topic


def test_worked_numbers() -> None:
    values = {entry.name: entry.value for entry in conventions()}
    gradients = {entry.name: entry.gradient for entry in conventions()}
    assert values["advantage=rloo"] == pytest.approx((1.0, -1.0, 0.6, -0.6))
    dual = values["loss=ppo, dual_clip=3"]
    assert dual == pytest.approx((-1.2, -1.1, 3.0, 0.8, 1.1, -0.5, 0.9, 3.0))
    assert values["aggregation=token-mean"] == pytest.approx((sum(dual) / 8,))
    true = (0.1058, -0.1767, 0.0709)
    assert gradients["kl_in=reward, kl_estimator=k1"] == pytest.approx(true, abs=5e-5)
    assert gradients["kl_in=loss, kl_estimator=k2"] == pytest.approx(true, abs=5e-5)
