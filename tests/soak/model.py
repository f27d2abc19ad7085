"""What a store under load must hold: for every object the states it may be in, and what each would look like.

Every object has one writer, so its states are known exactly but for the last operation of a connection that ended
before the answer. Rows are cut out of one table of random words at a place that follows from name and version: any
reader can tell which version it was given, and whether all of it is right.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

TABLE: Final = np.random.default_rng(20).standard_normal(1 << 21).astype(np.float16)
FORMATS: Final = ("native", "native", "native", "int8", "fp8", "mlx4g32", "turbo4", "turbo3")
ERROR: Final = {"native": 0.0, "int8": 0.02, "fp8": 0.08, "mlx4g32": 0.25, "turbo4": 0.25, "turbo3": 0.4}  # relative
ANSWERED: Final = 0.5  # seconds in which a reply is noted: the server may have seen two uses in the other order
RECENT: Final = 3.0  # seconds after which a use is on disk: a kill forgets later ones

Rows = tuple[Any, Any]


@dataclass(frozen=True)
class Version:
    """One content of a namespace."""

    ns: str
    number: int

    @property
    def digest(self) -> str:
        """Of tokens and model, as far as the server can tell."""
        return hashlib.sha256(f"{self.ns}/{self.number}".encode()).hexdigest()

    @property
    def vquant(self) -> str:
        """The format it is stored in."""
        return FORMATS[self._bytes[0] % len(FORMATS)]

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(layers, heads, tokens, head_dim)."""
        raw = self._bytes
        return 1 + raw[1] % 4, 1 + raw[2] % 3, (16, 64, 100, 200, 500, 1500)[raw[3] % 6], 64

    @property
    def _bytes(self) -> bytes:
        return bytes.fromhex(self.digest)

    @property
    def nbytes(self) -> int:
        """Of all rows in fp16."""
        return 4 * int(np.prod(self.shape))

    def rows(self) -> Rows:
        """K and V."""
        size = int(np.prod(self.shape))
        sides = []
        for at in (4, 8):
            start = int.from_bytes(self._bytes[at : at + 4], "little") % (len(TABLE) - size)
            sides.append(TABLE[start : start + size].reshape(self.shape))
        return sides[0], sides[1]

    def wrong(self, got: Rows) -> str:
        """What differs from the rows as they were stored; empty when nothing does."""
        for name, have, want in zip("KV", got, self.rows(), strict=True):
            if have.shape != want.shape:
                return f"{name} of shape {have.shape}, not {want.shape}"
            if self.vquant == "native":
                if not np.array_equal(have, want):
                    return f"{int((have != want).sum())} of {want.size} values of {name} are others"
                continue
            wide = want.astype(np.float32)
            error = float(np.linalg.norm(have - wide) / np.linalg.norm(wide))
            if not error <= ERROR[self.vquant]:
                return f"{name} in {self.vquant} differs by {error:.3f} of its norm"
        return ""


def checksum(got: Rows) -> bytes:
    """Of fetched rows: a quantized prefix comes back the same each time."""
    hasher = hashlib.blake2b(digest_size=16)
    for side in got:
        hasher.update(np.ascontiguousarray(side).data.cast("B"))
    return hasher.digest()


class Pressure:
    """How much was stored since when, and when the server was killed: what eviction may have taken.

    Least recent use goes first, so a prefix stays while what was used since, and what was stored since over that, is
    less than half of the cap: old files of replaced entries and copies of compactions take their part too.

    Attributes:
        cap: --max-bytes.
        stored: bytes offered since the start, and a little for every file.
        kills: times.
        touched: (time, bytes) of the last use of every namespace, by anybody.
    """

    def __init__(self, cap: int) -> None:
        self.cap = cap
        self.stored = 0
        self.kills: list[float] = []
        self.touched: dict[str, tuple[float, int]] = {}
        self._lock = threading.Lock()

    def add(self, nbytes: int) -> None:
        """Somebody stores."""
        with self._lock:
            self.stored += nbytes + 8192

    def touch(self, version: Version) -> None:
        """Somebody stored or found it."""
        with self._lock:
            self.touched[version.ns] = time.monotonic(), version.nbytes

    def since(self, when: float, stored: int) -> int:
        """Bytes used or stored since a use at this time and with this `stored`."""
        with self._lock:
            return self.stored - stored + sum(nbytes for at, nbytes in self.touched.values() if at >= when - ANSWERED)

    def may_be_gone(self, uses: deque[tuple[float, int]]) -> bool:
        """Whether a prefix with these uses may have been evicted."""
        kills = self.kills
        for when, stored in reversed(uses):
            if not any(when <= kill < when + RECENT for kill in kills):
                return self.since(when, stored) > self.cap // 2
        return True


@dataclass
class Prefix:
    """One namespace.

    Attributes:
        number: of the last version given out.
        may: what may be stored; None = nothing complete.
        uses: (time, bytes stored by all) of the last uses.
        sums: checksum of a version's rows as they were first fetched.
        lock: for readers that are not its writer.
    """

    ns: str
    number: int = 0
    may: set[Version | None] = field(default_factory=lambda: {None})
    uses: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=64))
    sums: dict[int, bytes] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def next(self) -> Version:
        """A new version."""
        with self.lock:
            self.number += 1
            self.sums.pop(self.number - 4, None)
            return Version(self.ns, self.number)

    def begin(self, outcome: Version | None) -> None:
        """An operation that leads to `outcome` is about to be sent."""
        with self.lock:
            self.may = {*self.may, outcome, None}  # a REPLACE that stops in the middle leaves nothing complete

    def settle(self, outcome: Version | None, pressure: Pressure) -> None:
        """It was acknowledged, or a reply told what is there."""
        with self.lock:
            self.may = {outcome}
        if outcome is not None:
            self.used(pressure)
            pressure.touch(outcome)

    def used(self, pressure: Pressure) -> None:
        """It was asked for, and there."""
        self.uses.append((time.monotonic(), pressure.stored))

    def past(self, pressure: Pressure) -> str:
        """What there is to know about its last uses."""
        now, uses = time.monotonic(), list(self.uses)[-4:]
        when = ", ".join(
            f"{now - at:.1f} s and {pressure.since(at, held) >> 20} MiB ago" for at, held in reversed(uses)
        )
        kills = ", ".join(f"{now - at:.1f} s" for at in pressure.kills[:-6:-1])
        return f"used {when or 'never'}; kills {kills or 'none'} ago"

    def found(self, got: Version | None, pressure: Pressure) -> str:
        """A reply said what is there; what is wrong with that."""
        with self.lock:
            may = set(self.may)
        wrong = ""
        if got not in may and not (got is None and pressure.may_be_gone(self.uses)):
            names = ", ".join("nothing" if v is None else str(v.number) for v in may)
            wrong = f"{self.ns}: {'nothing' if got is None else f'version {got.number}'} is there, not {names}"
        self.settle(got, pressure)
        return wrong

    def seen(self, version: Version, got: Rows) -> str:
        """Rows were fetched as those of a version; what is wrong with them."""
        wrong = version.wrong(got)
        digest = checksum(got)
        with self.lock:
            first = self.sums.setdefault(version.number, digest)
        if not wrong and first != digest:
            wrong = f"other words than the first time ({version.vquant})"
        return f"{self.ns} version {version.number}: {wrong}" if wrong else ""


@dataclass
class Key:
    """One key of the ordinary keyspace.

    Attributes:
        may: values it may have; None = absent.
        low, high: between these times it expires; None = never.
    """

    name: bytes
    may: set[bytes | None] = field(default_factory=lambda: {None})
    low: float | None = None
    high: float | None = None

    def begin(self, *outcomes: bytes | None) -> None:
        """An operation is about to be sent."""
        self.may = {*self.may, *outcomes}

    def may_expire(self, low: float | None) -> None:
        """A life time that begins or ends is about to be sent: until the answer it is that one or the old one."""
        known = [time for time in (self.low, low) if time is not None]
        if known:
            self.low, self.high = min(known), float("inf")

    def settle(self, value: bytes | None, ttl: tuple[float, float] | None = None) -> None:
        """It was acknowledged."""
        self.may = {value}
        self.low, self.high = ttl or (None, None)

    def found(self, got: bytes | None, asked: float, answered: float) -> str:
        """A GET that was sent and answered at these times; what is wrong with the reply."""
        may = set(self.may)
        if self.low is not None and self.high is not None:
            if answered > self.low:
                may.add(None)
            if asked > self.high + 0.5:
                may = {None}
        if got in may:
            if len(self.may) > 1 or got is None:
                self.settle(got, (self.low, self.high) if got is not None and self.low and self.high else None)
            return ""
        shown = ["nothing" if value is None else f"{len(value)} bytes" for value in may]
        return f"{self.name.decode()}: {'nothing' if got is None else f'{len(got)} bytes'}, not {' or '.join(shown)}"
