"""The mutant runner itself: it must cry out when a broken program passes its tests."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.run_mutants import MutantError, apply_patch, read_mutant, run_mutants

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
def tree(tmp_path: Path) -> Path:
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


def patch_of(tree: Path, *tests: str, diff: str = DIFF) -> Path:
    path = tree.parent / "mutant.patch"
    path.write_text("".join(f"# kills: {test}\n" for test in tests) + diff)
    return path


def verdicts(tree: Path, patch: Path) -> list[str]:
    return [outcome.verdict for outcome in run_mutants(tree, [patch], jobs=1)]


def test_mutant_that_its_test_notices_is_killed(tree: Path) -> None:
    assert verdicts(tree, patch_of(tree, STRONG)) == ["killed"]


def test_mutant_that_passes_its_test_is_a_survivor(tree: Path) -> None:
    assert verdicts(tree, patch_of(tree, WEAK)) == ["survived"]


def test_every_named_test_has_to_notice(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert verdicts(tree, patch_of(tree, STRONG, WEAK)) == ["survived"]
    assert f"not noticed by {WEAK}" in capsys.readouterr().out


def test_patch_that_breaks_the_import_is_an_error_not_a_kill(tree: Path) -> None:
    broken = DIFF.replace("+    return 3 * x", "+    return 3 *")
    assert verdicts(tree, patch_of(tree, STRONG, diff=broken)) == ["error"]


def test_stale_patch_is_an_error(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tree / "shardloop/sums.py").write_text(SOURCE.replace("2 * x", "x * 2"))
    assert verdicts(tree, patch_of(tree, STRONG)) == ["error"]
    assert "no longer applies" in capsys.readouterr().out


def test_named_test_that_fails_anyway_is_refused(tree: Path) -> None:
    (tree / "tests/test_sums.py").write_text(TEST.replace("== 6", "== 7"))
    with pytest.raises(MutantError, match="do not pass on the code as it is"):
        verdicts(tree, patch_of(tree, STRONG))


def test_unknown_test_is_refused(tree: Path) -> None:
    with pytest.raises(MutantError, match="do not pass on the code as it is"):
        verdicts(tree, patch_of(tree, "tests/test_sums.py::test_gone"))


def test_patch_without_header_is_refused(tree: Path) -> None:
    with pytest.raises(MutantError, match="begin the patch with"):
        read_mutant(patch_of(tree))


def test_patch_applies_although_the_copy_lies_inside_a_repository(tree: Path) -> None:
    copy = tree / "nested"
    shutil.copytree(tree / "shardloop", copy / "shardloop")
    apply_patch(read_mutant(patch_of(tree, STRONG)), copy)
    assert "3 * x" in (copy / "shardloop/sums.py").read_text()
