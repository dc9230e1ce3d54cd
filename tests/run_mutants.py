"""Breaks the code on purpose: each patch of tests/mutants must fail the tests that it names.

Run by `make mutants`. A patch opens with a line `# kills: tests/room/test_x.py::test_name` for
each test that has to notice it.

    for each patch:   copy ──▶ apply ──▶ run its tests ──▶ killed | survived | error
    in the end the cases that noticed pass on a plain copy of the tree
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Literal

from tests.warm_pytest import WarmPytest

ROOT = Path(__file__).resolve().parents[1]
PATCHES = ROOT / "tests" / "mutants"
HEADER = "# kills:"
PYTEST_PASSED, PYTEST_FAILED = 0, 1
Verdict = Literal["killed", "survived", "error"]
TIMEOUT_S = 600.0
"""For all tests of one mutant; each test has its own, shorter limit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mutant:
    """One patch and the tests that have to notice it."""

    patch: Path
    tests: tuple[str, ...]
    """Pytest ids, each of which must fail (a parametrised test: in at least one case)."""

    @property
    def name(self) -> str:
        return self.patch.stem


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    mutant: Mutant
    verdict: Verdict
    detail: str
    cases: Sequence[str]
    """Of a killed one: a case of each test that noticed."""
    seconds: float


class MutantError(Exception):
    """A mutant that says nothing: no header, no longer applies, or its tests cannot run."""


def read_mutant(patch: Path) -> Mutant:
    """Raises MutantError when the patch does not name the tests that it is meant for."""
    lines = patch.read_text(encoding="utf-8").splitlines()
    tests = tuple(line[len(HEADER) :].strip() for line in lines if line.startswith(HEADER))
    if not tests or not all("::" in test for test in tests):
        raise MutantError(
            f"{patch.name}: begin the patch with '{HEADER} tests/…/test_x.py::test_name'"
        )
    return Mutant(patch=patch, tests=tests)


@contextmanager
def copied_tree(root: Path) -> Iterator[Path]:
    """A throw-away copy of what git tracks or would track; nothing that it ignores."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout
    with tempfile.TemporaryDirectory(prefix="shardloop-mutant-") as folder:
        copy = Path(folder).resolve() / "tree"
        for name in filter(None, listed.split("\0")):
            if (root / name).is_file():
                (copy / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / name, copy / name)
        yield copy


def apply_patch(mutant: Mutant, tree: Path, *options: str) -> None:
    """With the option `--check` nothing is changed.

    Raises MutantError when the code has moved on and the patch no longer fits it exactly.
    """
    # Without the ceiling git could take the tree for a part of a repository around it, and skip
    # every file without a word.
    env = {**os.environ, "GIT_CEILING_DIRECTORIES": str(tree.parent)}
    command = ["git", "apply", "--verbose", *options, str(mutant.patch)]
    done = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True)
    if done.returncode != 0:
        raise MutantError(
            f"no longer applies; renew it against the code of today\n{done.stderr.strip()}"
        )


def cases_that_noticed(output: str, tests: Sequence[str]) -> dict[str, str]:
    """A case of each of `tests` that pytest's short summary lists as failed."""
    lines = [line for line in output.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    cases = [line.split(" ", 1)[1].split(" - ", 1)[0] for line in lines]
    return {test: case for case in cases for test in tests if test in (case, case.split("[")[0])}


def try_mutant(root: Path, mutant: Mutant, pytests: WarmPytest) -> Outcome:
    """Apply one patch to a fresh copy and run its tests there."""
    start = time.perf_counter()
    verdict, detail, cases = _verdict(root, mutant, pytests)
    seconds = time.perf_counter() - start
    return Outcome(mutant=mutant, verdict=verdict, detail=detail, cases=cases, seconds=seconds)


def _verdict(root: Path, mutant: Mutant, pytests: WarmPytest) -> tuple[Verdict, str, Sequence[str]]:
    try:
        with copied_tree(root) as copy:
            apply_patch(mutant, copy)
            code, output = pytests.run(copy, mutant.tests, timeout_s=TIMEOUT_S)
    except MutantError as error:
        return "error", str(error), ()
    if code not in (PYTEST_PASSED, PYTEST_FAILED):
        return "error", f"pytest ended with {code}\n{output}", ()
    cases = cases_that_noticed(output, mutant.tests)
    if blind := set(mutant.tests) - set(cases):
        return "survived", "not noticed by " + ", ".join(sorted(blind)), ()
    return "killed", "", tuple(cases.values())


def check_plain_tree(
    root: Path, cases: Iterable[str], pytests: WarmPytest, pool: ThreadPoolExecutor
) -> None:
    """Raises MutantError when a case fails on the code as it is: that it noticed proves nothing."""
    by_file = defaultdict(set)
    for case in cases:
        by_file[case.split("::")[0]].add(case)
    with copied_tree(root) as copy:
        runs = pool.map(
            lambda cases: pytests.run(copy, sorted(cases), timeout_s=TIMEOUT_S), by_file.values()
        )
        failures = [output for code, output in runs if code != PYTEST_PASSED]
    if failures:
        raise MutantError(
            "tests that noticed do not pass on the code as it is\n" + "\n".join(failures)
        )


def run_mutants(root: Path, patches: Sequence[Path], *, jobs: int) -> list[Outcome]:
    """Try every patch, `jobs` at a time, and print a line for each as it ends.

    Raises:
        MutantError: a patch has no header, or a test that noticed fails on the plain tree.
    """
    mutants = [read_mutant(patch) for patch in patches]
    outcomes = []
    with WarmPytest(jobs=jobs) as pytests, ThreadPoolExecutor(max_workers=jobs) as pool:
        for outcome in pool.map(lambda mutant: try_mutant(root, mutant, pytests), mutants):
            print(
                f"{outcome.verdict:<9} {outcome.mutant.name}  ({outcome.seconds:.1f} s)", flush=True
            )
            if outcome.detail:
                print(outcome.detail, flush=True)
            outcomes.append(outcome)
        check_plain_tree(root, chain(*(outcome.cases for outcome in outcomes)), pytests, pool)
    return outcomes


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "names", nargs="*", help="patches to try, by file name without .patch (default: all)"
    )
    parser.add_argument(
        "--jobs", type=int, default=min(4, os.cpu_count() or 1), help="patches at a time"
    )
    args = parser.parse_args(argv)
    patches = sorted(PATCHES.glob("*.patch"))
    if args.names:
        patches = [patch for patch in patches if patch.stem in args.names]
    if not patches:
        print(f"no such patch in tests/mutants: {', '.join(args.names) or '(the folder is empty)'}")
        return 2
    try:
        outcomes = run_mutants(ROOT, patches, jobs=args.jobs)
    except MutantError as error:
        print(f"error: {error}")
        return 2
    killed = sum(outcome.verdict == "killed" for outcome in outcomes)
    print(f"mutants: {killed} killed, {len(outcomes) - killed} not")
    return 0 if killed == len(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
