"""Resharding: planning at scale, transfers between processes, deltas, checkpoints.

    python -m benchmarks.reshard [--quick | --smoke] [--only planning|transfer|delta|checkpoint]

Ours beside other ways to the same result and beside the limits of this machine, all measured in the
run. Results are proved equal before anything is timed. Goals are printed with what was measured;
nothing is asserted on time. Planning needs only shapes: the models are public ones at full size.
"""

import argparse
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import json
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

PARTS = ("planning", "transfer", "delta", "checkpoint")
MAX_LOAD = 1.5


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(prog="benchmarks.reshard", description=__doc__.split("\n")[0])
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="smaller, within 4 minutes")
    size.add_argument("--smoke", action="store_true", help="toy sizes: that it runs, not how fast")
    parser.add_argument("--only", choices=PARTS, help="one part of it")
    parser.add_argument("--anyway", action="store_true", help="measure on a busy machine too")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write all numbers here as well")
    args = parser.parse_args(argv)
    # Processes that plan import this module as their main one: what needs torch waits until here.
    from benchmarks.measure import environment, require_quiet

    if not (args.anyway or args.smoke):
        require_quiet(MAX_LOAD)
    which = "SMOKE" if args.smoke else "QUICK" if args.quick else "FULL"
    results: dict[str, Any] = {"benchmark": "reshard", "environment": environment()}
    print("  ".join(f"{name} {value}" for name, value in results["environment"].items()))
    for name in (args.only,) if args.only else PARTS:
        part = import_module(f"benchmarks.reshard_{name}")
        print(f"\n{name}: {part.__doc__.splitlines()[0]}", flush=True)
        results[name] = part.run(getattr(part, which))
        part.report(results[name])
        if args.json:
            args.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return results


if __name__ == "__main__":
    main()
