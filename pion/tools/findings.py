"""What a verification says about a file, and how it tells how far it has come."""

from __future__ import annotations

import sys
import threading
import time
from dataclasses import dataclass
from typing import Any, Final

WHY: Final[dict[str, str]] = {
    "short": "fewer bytes than a record",
    "zeros": "zeros where a record should begin",
    "magic": "bytes that are no record",
    "version": "a record of another format version",
    "checksum": "the checksum of a record's header is wrong",
    "field": "a header that no writer makes",
    "torn": "the last record ends behind the end of the file",
    "end": "the end of the file",
    "garbage": "bytes that are no record",
    "group": "a group of records that is not whole",
    "kind": "a record of a kind that this version does not know",
    "database": "a record of a database that is not there",
}
"""In words, why reading stopped: the reasons of pion._core.framing and of pion._core.ksload."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Something a verification noticed.

    Attributes:
        path: of the file, as it was given or relative to the data directory.
        offset: byte in the file, where one can be named.
        text: what is wrong.
        problem: damage, or a contradiction; otherwise something worth knowing that the next start puts right.
    """

    path: str
    offset: int | None
    text: str
    problem: bool = True

    def __str__(self) -> str:
        where = self.path if self.offset is None else f"{self.path}: offset {self.offset}"
        return f"{'problem' if self.problem else 'note'}: {where}: {self.text}"

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        return {"path": self.path, "offset": self.offset, "problem": self.problem, "text": self.text}


class Progress:
    """A line on a terminal that says how many bytes have been compared; silent elsewhere. Any thread may add to it.

    Args:
        total: bytes there are.
        shown: None = when stderr is a terminal.
    """

    WIDTH: Final = 30
    EVERY: Final = 0.1  # seconds

    def __init__(self, total: int, *, shown: bool | None = None) -> None:
        self.total = max(total, 1)
        self.done = 0
        self._shown = sys.stderr.isatty() if shown is None else shown
        self._lock = threading.Lock()
        self._began = time.monotonic()
        self._last = 0.0

    def add(self, nbytes: int) -> None:
        """So many bytes more."""
        with self._lock:
            self.done += nbytes
            now = time.monotonic()
            if self._shown and now - self._last >= self.EVERY:
                self._last = now
                self._draw(now)

    def _draw(self, now: float) -> None:
        share = min(self.done / self.total, 1.0)
        bar = "#" * round(share * self.WIDTH)
        rate = self.done / max(now - self._began, 1e-3) / 2**20
        line = f"\r[{bar:<{self.WIDTH}}] {share:4.0%}  {self.done / 2**20:,.0f} of {self.total / 2**20:,.0f} MiB"
        print(f"{line}  {rate:,.0f} MiB/s ", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Take the line away, so that something else can be printed."""
        with self._lock:
            if self._shown and self._last:
                print("\r\033[K", end="", file=sys.stderr, flush=True)
                self._last = 0.0
