"""The mutant runner itself: it must cry out when a broken program passes its tests."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.run_mutants import (
    PATCHES,
    ROOT,
    MutantError,
    apply_patch,
    read_mutant,
    run_mutants,
)

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
    patches = [
        patch_of(tree, STRONG, name="strong"),
        patch_of(tree, WEAK, name="weak"),
        patch_of(tree, STRONG, WEAK, name="both"),
        patch_of(tree, STRONG, name="broken import", diff=broken),
        patch_of(tree, STRONG, name="stale", diff=stale),
    ]
    outcomes = {o.mutant.name: o for o in run_mutants(tree, patches, jobs=2)}
    assert {name: outcome.verdict for name, outcome in outcomes.items()} == {
        "strong": "killed",
        "weak": "survived",
        "both": "survived",
        "broken import": "error",
        "stale": "error",
    }
    assert outcomes["both"].detail == f"not noticed by {WEAK}"
    assert "no longer applies" in outcomes["stale"].detail
    assert outcomes["both"].detail in capsys.readouterr().out


def test_named_test_that_fails_anyway_is_refused(tree: Path) -> None:
    (tree / "tests/test_sums.py").write_text(TEST.replace("== 6", "== 7"))
    with pytest.raises(MutantError, match="do not pass on the code as it is"):
        run_mutants(tree, [patch_of(tree, STRONG)], jobs=1)


def test_unknown_test_is_refused(tree: Path) -> None:
    with pytest.raises(MutantError, match="do not pass on the code as it is"):
        run_mutants(tree, [patch_of(tree, "tests/test_sums.py::test_gone")], jobs=1)


def test_patch_without_header_is_refused(tree: Path) -> None:
    with pytest.raises(MutantError, match="begin the patch with"):
        read_mutant(patch_of(tree))


def test_patch_applies_although_the_copy_lies_inside_a_repository(tree: Path) -> None:
    copy = tree / "nested"
    shutil.copytree(tree / "shardloop", copy / "shardloop")
    apply_patch(read_mutant(patch_of(tree, STRONG)), copy)
    assert "3 * x" in (copy / "shardloop/sums.py").read_text()
