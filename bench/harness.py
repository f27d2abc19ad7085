"""Registry, interleaved rounds and report of the benchmarks.

A benchmark is a function registered with `@bench(NAME, unit=..., bar=...)` that returns a `Result` or several.
`value` and `baseline` are medians of interleaved rounds in `unit`; `ratio` is above 1 when ours is better, whatever
the direction of the unit. One JSON line per result goes to bench/results/latest.jsonl.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TextIO

ROUNDS = 7
RESULTS = Path(__file__).parent / "results" / "latest.jsonl"


@dataclass
class Result:
    """One line of the report.

    Attributes:
        name: stable name of the figure.
        value: ours, in `unit`.
        unit: unit of `value` and `baseline`.
        baseline: what it is compared with, or None for an absolute figure.
        ratio: above 1 means better than the baseline; None without one.
        bar: what the project asks of `ratio`, or of `value` where there is no baseline.
        at_most: the bar is an upper bound on `value`.
        note: what was compared, in a few words.
    """

    name: str
    value: float
    unit: str
    baseline: float | None = None
    ratio: float | None = None
    bar: float | None = None
    at_most: bool = False
    note: str = ""
    rounds: int = ROUNDS
    spread: list[float] = field(default_factory=list)

    @property
    def met(self) -> bool | None:
        """Whether the bar is met; None when there is none."""
        if self.bar is None:
            return None
        if self.at_most:
            return self.value <= self.bar
        return (self.ratio if self.ratio is not None else self.value) >= self.bar


Function = Callable[[], "Result | Iterable[Result]"]
REGISTRY: dict[str, tuple[Function, tuple[str, ...]]] = {}


def bench(*names: str) -> Callable[[Function], Function]:
    """Register a benchmark under the names of the results it gives."""

    def register(function: Function) -> Function:
        for name in names:
            REGISTRY[name] = (function, names)
        return function

    return register


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def interleave(*samples: Callable[[], float], rounds: int = ROUNDS, warm: int = 1) -> list[list[float]]:
    """Run the samplers in turn, so that a slow minute of the machine hits all of them; one list of values each."""
    columns: list[list[float]] = [[] for _ in samples]
    for turn in range(rounds + warm):
        for column, sample in zip(columns, samples, strict=True):
            value = sample()
            if turn >= warm:
                column.append(value)
    return columns


def compare(
    name: str,
    ours: Callable[[], float],
    baseline: Callable[[], float],
    *,
    unit: str,
    higher_is_better: bool = True,
    bar: float | None = None,
    note: str = "",
    rounds: int = ROUNDS,
) -> Result:
    """Medians of interleaved rounds of ours and the baseline, and their ratio."""
    a, b = interleave(ours, baseline, rounds=rounds)
    value, base = statistics.median(a), statistics.median(b)
    ratio = value / base if higher_is_better else base / value
    return Result(name, value, unit, base, ratio, bar, note=note, rounds=rounds, spread=[min(a), max(a)])


def machine() -> dict[str, object]:
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [
            line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")
        ]
        model = names[0] if names else model
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


def commit() -> str:
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False, cwd=Path(__file__).parent
    )
    return done.stdout.strip() or "unknown"


def number(value: float | None) -> str:
    if value is None:
        return "-"
    if value == 0 or not math.isfinite(value):
        return str(value)
    digits = max(0, 3 - math.floor(math.log10(abs(value))))
    return f"{value:,.{min(digits, 4)}f}"


def report(result: Result) -> str:
    met = {None: " ", True: "ok", False: "LOW"}[result.met]
    if result.at_most and result.met is False:
        met = "HIGH"
    bar = "" if result.bar is None else f"{'<=' if result.at_most else '>='} {number(result.bar)}"
    return (
        f"{result.name:24} {number(result.value):>12} {result.unit:10} {number(result.baseline):>12} "
        f"{number(result.ratio):>8}  {bar:>10} {met:5}{result.note}"
    )


def tell(results: Iterable[Result], lines: TextIO, about: dict[str, object]) -> int:
    """Print and keep results as they come; how many missed their bar."""
    missed = 0
    for result in results:
        print(report(result), flush=True)
        missed += result.met is False
        lines.write(json.dumps(asdict(result) | about | {"time": int(time.time())}) + "\n")
        lines.flush()
    return missed


def run(names: list[str]) -> int:
    """Run the named benchmarks (all when empty); the exit code is 1 when a bar was missed."""
    unknown = [name for name in names if name not in REGISTRY]
    if unknown:
        print(f"no such benchmark: {', '.join(unknown)}; --list names them", file=sys.stderr)
        return 2
    wanted = names or list(REGISTRY)
    where, at = machine(), commit()
    RESULTS.parent.mkdir(exist_ok=True)
    done: set[int] = set()
    missed = 0
    print(f"{'name':24} {'value':>12} {'unit':10} {'baseline':>12} {'ratio':>8}  {'bar':>10}")
    with RESULTS.open("w") as lines:
        for name in wanted:
            function, _ = REGISTRY[name]
            if id(function) in done:
                continue
            done.add(id(function))
            outcome = function()
            results = iter([outcome] if isinstance(outcome, Result) else outcome)
            with contextlib.ExitStack() as ends:
                if isinstance(results, Generator):  # it holds servers and threads, also when printing fails
                    ends.callback(results.close)
                missed += tell(results, lines, {"machine": where, "commit": at})
    return 1 if missed else 0
