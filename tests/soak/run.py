"""A mixed load on a real server for a time: kills, ends and starts, and in between whether all of it is right.

Two thirds of the time the server is killed (SIGKILL, four of five times) or ended (SIGTERM) every few seconds. In the
last third it is left alone, so that memory and descriptors have time to grow if they do.
"""

from __future__ import annotations

import os
import random
import shutil
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from pion import Client
from pion.testing import Server
from tests.soak.model import Pressure
from tests.soak.worker import Shared, Worker

CLIENTS: Final = 8
CAP: Final = 28 << 20  # --max-bytes: about four fifths of what the clients have names for
SLACK: Final = 6 << 20  # one record, and the blocks a file system needs for itself
_MIB: Final = 1 << 20


@dataclass
class Sample:
    """The server at one moment of the quiet third."""

    anonymous: int
    descriptors: int
    file_bytes: int


@dataclass
class Report:
    """What came of a soak."""

    seconds: float
    figures: dict[str, int | float] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)

    def text(self) -> str:
        """For a person to read."""
        lines = [f"{name:<28}{value:>16,}" for name, value in self.figures.items()]
        lines.append(f"{'violations':<28}{len(self.violations):>16,}")
        return "\n".join([*lines, *(f"VIOLATION {text}" for text in self.violations[:20])])


class Soak:
    """One run.

    Args:
        directory: for the server's data.
        seconds: how long the clients work.
        seed: of everybody's choices.
        say: takes lines of progress.
    """

    def __init__(self, directory: Path, seconds: float, seed: int, say: Callable[[str], None]) -> None:
        self.directory, self.seconds, self.say = directory, seconds, say
        self.rng = random.Random(seed)
        self.shared = Shared(Pressure(CAP))
        flags = ["--port", "0", "--dir", str(directory), "--kvcache", "--max-bytes", str(CAP)]
        self.server = Server(flags)
        self.workers = [
            Worker(self.shared, number, self.server.port, self.rng.randrange(1 << 30)) for number in range(CLIENTS)
        ]
        self.samples: list[Sample] = []
        self.printed: deque[str] = deque(maxlen=20)  # by the servers before this one
        self.kills = self.ends = 0
        self.started_at = time.monotonic()

    def run(self) -> Report:
        """Do it all; the server has ended when this returns."""
        try:
            self.shared.up.set()
            for worker in self.workers:
                worker.start()
            self._restarts(self.started_at + self.seconds * 2 / 3)
            self._quiet(self.started_at + self.seconds)
            self.shared.stop.set()
            for worker in self.workers:
                worker.join(120)
                self.shared.check(f"{worker.name} does not end" if worker.is_alive() else "")
            if not self.shared.violations:  # what is there may tell why
                self._empty()
            status = self.server.stop()
            self.shared.check("" if status == 0 else f"SIGTERM ended the server with status {status}")
        finally:
            self.shared.stop.set()
            self.shared.up.set()
            if self.server.process.poll() is None:
                self.server.kill()
        return self._report()

    # --- the server -----------------------------------------------------------------------------------------------

    def _restarts(self, end: float) -> None:
        while True:
            pause = self.rng.uniform(1.0, 8.0)
            if time.monotonic() + pause > end or self.shared.violations:
                time.sleep(max(0.0, end - time.monotonic()) if not self.shared.violations else 0)
                return
            time.sleep(pause)
            self._check_disk()
            self.shared.up.clear()
            if self.rng.random() < 0.8:
                self.server.kill()
                self.shared.pressure.kills.append(time.monotonic())
                self.kills += 1
            else:
                status = self.server.stop()
                self.shared.check("" if status == 0 else f"SIGTERM ended the server with status {status}")
                self.ends += 1
            self._scan_log()
            self.printed.append(self.server.output)
            self.server.restart()
            self._check_disk()  # the cap holds before the first command
            self.shared.up.set()
            for worker in self.workers:
                worker.read_back()

    def _quiet(self, end: float) -> None:
        while (now := time.monotonic()) < end and not self.shared.violations:
            time.sleep(min(1.0, end - now))
            self.samples.append(self._sample())
            self._check_disk()
            if len(self.samples) % 30 == 0:
                last = self.samples[-1]
                self.say(
                    f"{now - self.started_at:6.0f} s: {last.anonymous / _MIB:.1f} MiB, {last.descriptors} descriptors, "
                    f"{sum(self.shared.counts[op] for op in ('fetch', 'store', 'get', 'set')):,} operations"
                )

    def _info(self) -> dict[str, int]:
        with Client(port=self.server.port) as client:
            lines = client.call("KV.PREFIX.INFO").decode().split("\r\n")
        return {name: int(value) for name, _, value in (line.partition(":") for line in lines) if value}

    def _sample(self) -> Sample:
        descriptors = len(os.listdir(f"/proc/{self.server.pid}/fd"))
        return Sample(self.server.anonymous_bytes(), descriptors, self._info()["vstore_file_bytes"])

    def _check_disk(self) -> None:
        info = self._info()
        if info["vstore_file_bytes"] > CAP + SLACK:
            self.shared.check(f"{info['vstore_file_bytes']} bytes of files, the cap is {CAP}")
        if info["vstore_quarantined"]:
            self.shared.check(f"{info['vstore_quarantined']} entries were found damaged")

    def _scan_log(self) -> None:
        for line in self.server.output.splitlines():
            if "Traceback" in line or " ERROR " in line or "failed" in line:
                self.shared.check(f"the server said: {line[:300]}")

    def _empty(self) -> None:
        """Everything dropped: the disk is free again."""
        with Client(port=self.server.port) as client:
            client.call("KV.PREFIX.FLUSH")
            client.call("FLUSHALL")
            for worker in self.workers:
                for prefix in worker.prefixes:
                    if client.call("KV.PREFIX.LOOKUP", prefix.ns) != "MISS":
                        self.shared.check(f"{prefix.ns} is there after FLUSH")
        end = time.monotonic() + 30
        while (left := used(self.directory / "kv") + used(self.directory / "export")) > _MIB:
            if time.monotonic() > end:
                self.shared.check(f"{left} bytes of files are left after everything was dropped")
                return
            time.sleep(0.1)

    # --- the report -----------------------------------------------------------------------------------------------

    def _report(self) -> Report:
        self._scan_log()
        counts = self.shared.counts
        report = Report(time.monotonic() - self.started_at, violations=self.shared.violations)
        figures = report.figures
        figures["seconds"] = round(report.seconds)
        figures["SIGKILL"], figures["SIGTERM"] = self.kills, self.ends
        bytes_of = {name: counts.pop(name, 0) for name in ("bytes stored", "bytes fetched")}
        figures |= dict(sorted(counts.items()))
        figures |= {f"MiB {name[6:]}": value // _MIB for name, value in bytes_of.items()}
        if len(self.samples) >= 8:
            self._flat(figures)
        return report

    def _flat(self, figures: dict[str, int | float]) -> None:
        """Whether memory and descriptors grew between the second and the last quarter of the quiet time."""
        quarter = len(self.samples) // 4
        early, late = self.samples[quarter : 2 * quarter], self.samples[-quarter:]
        for name, slack in (("anonymous", 6 * _MIB), ("descriptors", 24)):
            first, last = (statistics.median(getattr(sample, name) for sample in some) for some in (early, late))
            unit, shown = (_MIB, "MiB anonymous") if name == "anonymous" else (1, "descriptors")
            figures[f"{shown}, early"], figures[f"{shown}, late"] = round(first / unit, 1), round(last / unit, 1)
            if last > first * 1.1 + slack:
                self.shared.check(f"{shown} grew from {first / unit:.1f} to {last / unit:.1f}")
        figures["MiB of files, most"] = round(max(sample.file_bytes for sample in self.samples) / _MIB, 1)


def used(folder: Path) -> int:
    """Bytes on the disk below a folder."""
    total = 0
    for base, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(base, name)).st_blocks * 512
            except FileNotFoundError:
                continue
    return total


def soak(seconds: float, seed: int, directory: Path | None = None, say: Callable[[str], None] = print) -> Report:
    """A soak in a directory of its own, which is removed when all was well."""
    root = directory or Path(tempfile.mkdtemp(prefix="pion-soak-"))
    run = Soak(root / "data", seconds, seed, say)
    report = run.run()
    if directory is None and not report.violations:
        shutil.rmtree(root)
    elif report.violations:
        (root / "server.log").write_text("\n".join([*run.printed, run.server.output]))
        say(f"the data is kept in {root}")
    return report
