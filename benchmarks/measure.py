"""What every benchmark measures with: interleaved rounds, ratios, limits of this machine, memory.

Times are wall and CPU seconds; on a machine that others use too, only the latter mean much. Ratios
are taken within a round, whose arms ran one after the other, then summed up over the rounds.
"""

import gc
import multiprocessing
import os
import platform
import resource
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

MIB = 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class Timings:
    """One arm's seconds, a value for each round."""

    wall_s: tuple[float, ...]
    cpu_s: tuple[float, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Ratio:
    """Of one arm to another: the median over rounds and the extremes."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f}..{self.high:.2f})"


def require_quiet(max_load: float) -> None:
    """Exit (status 2) when the machine is busy; callers skip this under `--anyway`."""
    load = os.getloadavg()[0]
    if load > max_load:
        raise SystemExit(
            f"the load average of the last minute is {load:.2f}, above {max_load:.2f}: times "
            "would say more about the other programs; wait until it falls, or pass --anyway"
        )


def interleaved(
    arms: Mapping[str, Callable[[], object]], rounds: int, *, rotate: bool = True
) -> dict[str, Timings]:
    """Time each arm once per round, after one round that is not counted.

    Arms run one after the other within a round, and what an arm returns is freed before the next
    begins. Each round begins one arm later, unless `rotate` is off: for arms that build on each
    other.
    """
    names = list(arms)
    for name in names:
        arms[name]()
    wall: dict[str, list[float]] = {name: [] for name in names}
    cpu: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds):
        for place in range(len(names)):
            name = names[(turn * rotate + place) % len(names)]
            gc.collect()
            wall_s, cpu_s = seconds_of(arms[name])
            wall[name].append(wall_s)
            cpu[name].append(cpu_s)
    return {name: Timings(wall_s=tuple(wall[name]), cpu_s=tuple(cpu[name])) for name in names}


def seconds_of(work: Callable[[], object]) -> tuple[float, float]:
    """Wall and CPU seconds of one call."""
    wall_s, cpu_s = time.perf_counter(), cpu_seconds()
    work()
    return time.perf_counter() - wall_s, cpu_seconds() - cpu_s


def cpu_seconds() -> float:
    """User and system seconds so far, all threads, with child processes already waited for."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
    """Of two arms' values, round by round."""
    values = [own / other for own, other in zip(ours, theirs, strict=True)]
    return Ratio(median=statistics.median(values), low=min(values), high=max(values))


def gemm_flops_per_s(
    shapes: Sequence[tuple[int, int, int]], *, dtype: torch.dtype = torch.float32, repeats: int = 3
) -> float:
    """FLOPs per CPU second of plain matrix products [m, k] @ [k, n], one after the other.

    The best of `repeats` for each shape (m, k, n): a limit, not an average.
    """
    flops = seconds = 0.0
    for m, k, n in shapes:
        left, right = torch.randn(m, k, dtype=dtype), torch.randn(k, n, dtype=dtype)
        out = torch.empty(m, n, dtype=dtype)
        flops += 2.0 * m * k * n
        seconds += _best_cpu_s(partial(torch.mm, left, right, out=out), repeats)
    return flops / seconds


def memory_bytes_per_s(*, buffer_bytes: int = 512 * MIB, repeats: int = 3) -> float:
    """Bytes per CPU second of copying a buffer larger than a core's caches: read plus written."""
    source = torch.ones(buffer_bytes, dtype=torch.uint8)
    target = torch.empty_like(source)
    return 2 * buffer_bytes / _best_cpu_s(lambda: target.copy_(source), repeats)


def _best_cpu_s(work: Callable[[], object], repeats: int) -> float:
    work()
    return min(seconds_of(work)[1] for _ in range(repeats))


def peak_extra_bytes(prepare: Callable[..., Callable[[], object]], *args: Any) -> int:
    """How far resident memory rises during `work = prepare(*args); work()`, in a fresh process.

    `prepare` is a module-level function of the script or of a module; it makes the inputs and
    returns the work. What it allocated and freed does not count: the kernel's high-water mark is
    reset between the two. What `work` returns does count. Linux only.
    """
    environ = dict(os.environ)
    # Every large block is mapped on its own, so that freeing it lowers resident memory at once.
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(MIB // 8)
    try:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            return pool.apply(_peak_of, (prepare, args))
    finally:
        os.environ.clear()
        os.environ.update(environ)


def _peak_of(prepare: Callable[..., Callable[[], object]], args: tuple[Any, ...]) -> int:
    return rise_of(prepare(*args))[0]


def rise_of(work: Callable[[], Any]) -> tuple[int, Any]:
    """How far resident memory of this process rises during `work()`, and what that returns.

    Freed memory that the allocator kept beforehand hides a part of the rise. Linux only.
    """
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before = _status_bytes("VmRSS")
    result = work()
    return _status_bytes("VmHWM") - before, result


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise OSError(f"/proc/self/status has no {field}")


def environment() -> dict[str, str | int | float]:
    """What a reader needs to judge the numbers: versions, CPU, threads, load."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cpu": _cpu_model(),
        "cores": os.cpu_count() or 0,
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 2),
    }


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def print_table(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Columns as wide as their longest cell; the first one to the left, the others to the right."""
    lines = [[str(cell) for cell in line] for line in (headers, *rows)]
    widths = [max(len(cell) for cell in column) for column in zip(*lines, strict=True)]
    for line in lines:
        first, *others = (
            cell.ljust(width) if place == 0 else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        print("  ".join([first, *others]).rstrip())
