"""The mutant runner itself: it must cry out when a broken program passes its tests."""

import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from tests import warm_pytest
from tests.run_mutants import (
    PATCHES,
    ROOT,
    MutantError,
    apply_patch,
    read_mutant,
    run_mutants,
)
from tests.warm_pytest import WarmPytest

SOURCE = "def double(x):\n    return 2 * x\n"
TEST = """\
from shardloop.sums import double


def test_strong():
    assert double(3) == 6


def test_weak():
    assert double(0) == 0
"""
DIFF = """\
--- a/shardloop/sums.py
+++ b/shardloop/sums.py
@@ -1,2 +1,2 @@
 def double(x):
-    return 2 * x
+    return 3 * x
"""
STRONG = "tests/test_sums.py::test_strong"
WEAK = "tests/test_sums.py::test_weak"


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small project, whose tests need nothing imported beforehand."""
    monkeypatch.setattr(warm_pytest, "PRELOAD", ())
    root = tmp_path / "project"
    for name, text in {
        "shardloop/__init__.py": "",
        "shardloop/sums.py": SOURCE,
        "tests/test_sums.py": TEST,
        ".gitignore": "ignored.py\n__pycache__/\n",
        "ignored.py": "raise SystemExit\n",
        "pyproject.toml": "[tool.pytest.ini_options]\n",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    subprocess.run(["git", "init", "-q"], cwd=root, check=True)
    return root


def patch_of(tree: Path, *tests: str, name: str = "mutant", diff: str = DIFF) -> Path:
    path = tree.parent / f"{name}.patch"
    path.write_text("".join(f"# kills: {test}\n" for test in tests) + diff)
    return path


@pytest.mark.parametrize("patch", sorted(PATCHES.glob("*.patch")), ids=lambda path: path.stem)
def test_every_patch_fits_the_code_and_names_tests_that_exist(patch: Path) -> None:
    mutant = read_mutant(patch)
    apply_patch(mutant, ROOT, "--check")
    for test in mutant.tests:
        path, name = test.split("::")
        assert f"def {name}(" in (ROOT / path).read_text(), test


def test_a_mutant_is_killed_when_every_test_it_names_notices(
    tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = DIFF.replace("+    return 3 * x", "+    return 3 *")
    stale = DIFF.replace("-    return 2 * x", "-    return x * 2")
    crash = DIFF.replace("3 * x", "__import__('os').abort()")
    patches = [
        patch_of(tree, STRONG, name="strong"),
        patch_of(tree, WEAK, name="weak"),
        patch_of(tree, STRONG, WEAK, name="both"),
        patch_of(tree, STRONG, name="broken import", diff=broken),
        patch_of(tree, STRONG, name="stale", diff=stale),
        patch_of(tree, STRONG, name="crash", diff=crash),
    ]
    outcomes = {o.mutant.name: o for o in run_mutants(tree, patches, jobs=2)}
    assert {name: outcome.verdict for name, outcome in outcomes.items()} == {
        "strong": "killed",
        "weak": "survived",
        "both": "survived",
        "broken import": "error",
        "stale": "error",
        "crash": "error",
    }
    assert outcomes["both"].detail == f"not noticed by {WEAK}"
    assert "no longer applies" in outcomes["stale"].detail
    assert outcomes["crash"].detail.startswith("pytest ended with -6")
    assert outcomes["both"].detail in capsys.readouterr().out


def test_a_test_that_fails_anyway_is_refused(tree: Path) -> None:
    (tree / "tests/test_sums.py").write_text(TEST.replace("== 6", "== 7"))
    with pytest.raises(MutantError, match=r"do not pass on the code as it is(.|\n)*FAILED.*strong"):
        run_mutants(tree, [patch_of(tree, STRONG)], jobs=1)


def test_the_case_that_noticed_is_the_one_that_must_pass_without_the_patch(tree: Path) -> None:
    (tree / "tests/test_cases.py").write_text(CASES)
    patch = patch_of(tree, "tests/test_cases.py::test_cases")
    with pytest.raises(MutantError, match=r"test_cases\[True-1\]"):
        run_mutants(tree, [patch], jobs=1)
    (tree / "tests/test_cases.py").write_text(CASES.replace("fails and", "double(1) == 3 and"))
    assert [outcome.cases for outcome in run_mutants(tree, [patch], jobs=1)] == [
        ("tests/test_cases.py::test_cases[True-1]",)
    ]


def test_unknown_test_is_an_error(tree: Path) -> None:
    (outcome,) = run_mutants(tree, [patch_of(tree, "tests/test_sums.py::test_gone")], jobs=1)
    assert outcome.verdict == "error"
    assert "not found" in outcome.detail


def test_patch_without_header_is_refused(tree: Path) -> None:
    with pytest.raises(MutantError, match="begin the patch with"):
        read_mutant(patch_of(tree))


def test_patch_applies_although_the_copy_lies_inside_a_repository(tree: Path) -> None:
    copy = tree / "nested"
    shutil.copytree(tree / "shardloop", copy / "shardloop")
    apply_patch(read_mutant(patch_of(tree, STRONG)), copy)
    assert "3 * x" in (copy / "shardloop/sums.py").read_text()


HANG = """\
import subprocess, sys, time

TICK = "import time\\nwhile True: print(file=open('ticks', 'a')); time.sleep(0.01)"


def test_hang():
    subprocess.Popen([sys.executable, "-c", TICK])
    time.sleep(100)
"""


def test_what_hangs_is_ended_with_all_that_it_started_and_the_next_run_is_unhurt(
    tree: Path,
) -> None:
    (tree / "tests/test_hang.py").write_text(HANG)
    ticks, timeout_s = tree / "ticks", 2.0
    with WarmPytest(jobs=1) as pytests:
        while not ticks.exists():  # a busy machine may need longer to come this far
            code, _ = pytests.run(tree, ["tests/test_hang.py"], timeout_s=timeout_s)
            assert code == -signal.SIGKILL
            timeout_s *= 2
        num_ticks = ticks.stat().st_size
        assert pytests.run(tree, [STRONG, WEAK], timeout_s=60.0)[0] == 0
    assert ticks.stat().st_size == num_ticks


CASES = """\
import pytest

from shardloop.sums import double


@pytest.mark.parametrize("case", [0, 1, 2])
@pytest.mark.parametrize("fails", [True, False])
def test_cases(case, fails):
    assert not (fails and case == 1)


def test_other():
    assert False
"""


def test_a_test_that_failed_in_one_case_is_not_tried_in_further_ones(tree: Path) -> None:
    (tree / "tests/test_cases.py").write_text(CASES)
    with WarmPytest(jobs=1) as pytests:
        code, output = pytests.run(tree, ["tests/test_cases.py"], timeout_s=60.0)
    assert code == 1
    assert "2 failed, 1 passed, 4 skipped" in output


def test_a_package_from_elsewhere_is_not_tested_in_place_of_the_copy(tree: Path) -> None:
    shutil.rmtree(tree / "shardloop")
    with WarmPytest(jobs=1) as pytests:
        code, output = pytests.run(tree, [WEAK], timeout_s=60.0)
    assert code == pytest.ExitCode.INTERNAL_ERROR
    assert f"not from {tree}" in output
