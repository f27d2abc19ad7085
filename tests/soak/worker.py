"""One client of the soak: a thread that stores, fetches, drops and checks every answer against the model."""

from __future__ import annotations

import random
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from pion import Client
from pion.client.errors import IncompleteError, PrefixMissError
from pion.errors import CommandError, MismatchError
from tests.soak.model import Key, Prefix, Pressure, Version

PREFIXES: Final = 12  # of each client
KEYS: Final = 24
_PAUSE: Final = 0.004  # seconds between two operations at most: a load, not a benchmark
_GONE: Final = ("session not found",)  # between the lookup and the fetch
_REPLACED: Final = ("no stored layers", "does not hold all rows", "are outside the declared")


@dataclass
class Shared:
    """What all clients know.

    Attributes:
        up: set while the server answers.
        stop: set at the end.
        prefixes: of all clients.
        violations: what must not have happened.
        counts: what happened.
    """

    pressure: Pressure
    up: threading.Event = field(default_factory=threading.Event)
    stop: threading.Event = field(default_factory=threading.Event)
    prefixes: list[Prefix] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, what: str, number: int = 1) -> None:
        """Add to a figure."""
        with self.lock:
            self.counts[what] += number

    def check(self, problem: str) -> None:
        """Note what is wrong; nothing for an empty text."""
        if problem:
            with self.lock:
                self.violations.append(problem)


class Worker(threading.Thread):
    """A client.

    Args:
        number: of the client.
        port: of the server, the same over all restarts.
        seed: of its choices.
    """

    def __init__(self, shared: Shared, number: int, port: int, seed: int) -> None:
        super().__init__(name=f"soak {number}")
        self.shared = shared
        self.rng = random.Random(seed)
        self.client = Client(port=port, timeout=60.0, connect_timeout=10.0)
        self.prefixes = [Prefix(f"c{number}:p{i}") for i in range(PREFIXES)]
        self.keys = [Key(f"c{number}:k{i}".encode()) for i in range(KEYS)]
        shared.prefixes += self.prefixes
        self._again = threading.Event()
        self._ops: list[tuple[int, Callable[[], None]]] = [
            (16, self.store), (20, self.fetch), (8, self.others), (8, self.lookup), (5, self.drop), (3, self.half),
            (2, self.export), (2, self.append), (12, self.set), (14, self.get), (4, self.delete), (4, self.expire),
            (2, self.commit),
        ]  # fmt: skip

    def run(self) -> None:
        """Until it is told to stop; then everything is read back once more."""
        weights, calls = zip(*self._ops, strict=True)
        try:
            while not self.shared.stop.is_set():
                self.attempt(self.rng.choices(calls, weights)[0])
                if self._again.is_set():
                    self._again.clear()
                    self.attempt(self.everything)
                self.shared.stop.wait(self.rng.random() * _PAUSE)
            self.attempt(self.everything)
        except Exception as error:
            where = traceback.format_exc().strip().splitlines()[-3:-1]
            self.shared.check(f"{self.name} ended by itself: {error!r} at {' '.join(where)}")
        finally:
            self.client.close()

    def read_back(self) -> None:
        """Have everything read back soon: the server was started again."""
        self._again.set()

    def attempt(self, operation: Callable[[], None]) -> None:
        """One operation; when the server ends meanwhile, wait for the next one."""
        while not self.shared.up.wait(0.5):
            continue
        try:
            operation()
            self.shared.count(operation.__name__)
        except OSError:  # with the connection, or with the attempt to open one
            self.shared.count("unfinished")
            time.sleep(0.02)

    # --- prefixes -------------------------------------------------------------------------------------------------

    def _prefix(self) -> Prefix:
        return self.rng.choice(self.prefixes)

    def store(self) -> None:
        """A new version over the old one."""
        prefix = self._prefix()
        version = prefix.next()
        k, v = version.rows()
        prefix.begin(version)
        self.shared.pressure.add(version.nbytes)
        try:
            self.client.store(prefix.ns, k, v, vquant=version.vquant, digest=version.digest, replace=True)
        except (CommandError, IncompleteError) as error:
            # Evicted while it was stored, or no room at all: told, and nothing complete is there.
            self.shared.count("refused stores")
            self.shared.check(self._refusal(error))
            self.look(prefix)
            return
        prefix.settle(version, self.shared.pressure)
        self.shared.count("bytes stored", version.nbytes)

    def _refusal(self, error: Exception) -> str:
        text = str(error)
        fine = ("OOM", "session not found", "was dropped", "in the middle", "given to something else")
        return "" if any(word in text for word in fine) else f"a store was refused: {text[:300]}"

    def half(self) -> None:
        """A new version of which a part is stored: it must not be found."""
        prefix = self._prefix()
        version = prefix.next()
        layers, heads, tokens, size = version.shape
        k, _ = version.rows()
        prefix.begin(None)
        self.shared.pressure.add(version.nbytes)
        try:
            self.client.call(
                "KV.PREFIX.REGISTER", prefix.ns, heads * size, "fp16", "ROWS", tokens, "LAYERS", layers,
                "DIGEST", version.digest, "REPLACE",
            )  # fmt: skip
            self.client.call(
                "V.STOREBATCH", f"{prefix.ns}_pk", 0, 0, tokens, k[0].transpose(1, 0, 2).tobytes(), "FMT", "F16"
            )
        except CommandError as error:
            self.shared.check(self._refusal(error))
        self.look(prefix)

    def append(self) -> None:
        """A version stored in many small pieces, as an agent writes its journal; compaction has something to do."""
        prefix = self._prefix()
        version = prefix.next()
        layers, heads, tokens, size = version.shape
        sides = [side.transpose(0, 2, 1, 3).reshape(layers, tokens, -1) for side in version.rows()]
        prefix.begin(version)
        self.shared.pressure.add(2 * version.nbytes)  # an entry and its compacted form
        fmt = "fp16" if version.vquant == "native" else version.vquant
        shape = ["ROWS", tokens, "LAYERS", layers, "HEADS", heads, "HEAD_DIM", size]
        commands: list[Any] = [
            ["KV.PREFIX.REGISTER", prefix.ns, heads * size, fmt, *shape, "DIGEST", version.digest, "REPLACE"]
        ]
        step = max(1, tokens // 80)
        for start in range(0, tokens, step):
            for layer in range(layers):
                for side, sid in zip(sides, ("_pk", "_pv"), strict=True):
                    part = side[layer, start : start + step]
                    where = (layer, start, len(part))
                    commands.append(["V.STOREBATCH", prefix.ns + sid, *where, part.tobytes(), "FMT", "F16"])
        try:
            self.client.pipeline(commands)
        except CommandError as error:
            self.shared.check(self._refusal(error))
            self.look(prefix)
            return
        prefix.settle(version, self.shared.pressure)

    def look(self, prefix: Prefix) -> Version | None:
        """Find out what is there, and whether that may be so."""
        before = prefix.number
        found = self._which(prefix.ns)
        version = Version(prefix.ns, found) if found is not None else None
        assert before == prefix.number, "a prefix has one writer"
        if version is None and None not in prefix.may:
            self.shared.count("evicted")
        past = prefix.past(self.shared.pressure)
        problem = prefix.found(version, self.shared.pressure)
        if problem:
            why = self.client.call("KV.PREFIX.WHY", prefix.ns)
            self.shared.check(f"{problem}: {why.decode() if isinstance(why, bytes) else why} ({past})")
        return version

    def _which(self, ns: str) -> int | None:
        """The number of the complete version that is there; -1 for one nobody stored."""
        hit, info = self.client.pipeline([["KV.PREFIX.LOOKUP", ns], ["V.INFO", f"{ns}_pk"]], raise_on_error=False)
        if hit != "HIT" or not isinstance(info, bytes):
            return None
        digest = info.partition(b"\r\ndigest:")[2].partition(b"\r\n")[0].decode()
        last = next(prefix.number for prefix in self.shared.prefixes if prefix.ns == ns)
        numbers = (number for number in range(last, 0, -1) if Version(ns, number).digest == digest)
        number = next(numbers, -1)
        if number > 0:
            self.shared.pressure.touch(Version(ns, number))
        return number

    def lookup(self) -> None:
        """Whether it is there."""
        self.look(self._prefix())

    def fetch(self) -> None:
        """One of its own, as it must be."""
        prefix = self._prefix()
        version = self.look(prefix)
        if version is not None:
            self._fetch(prefix, version, own=True)

    def others(self) -> None:
        """One of another client, which may replace it meanwhile: what comes is one version as a whole."""
        prefix = self.rng.choice(self.shared.prefixes)
        with prefix.lock:
            may = set(prefix.may)
        floor = min((version.number for version in may if version is not None), default=prefix.number)
        gone = may == {None}
        number = self._which(prefix.ns)
        if number is None:
            return
        if number < floor or (gone and number <= floor):
            self.shared.check(f"{prefix.ns}: version {number} is served, it was replaced or dropped before")
            return
        self._fetch(prefix, Version(prefix.ns, number), own=False)

    def _fetch(self, prefix: Prefix, version: Version, *, own: bool) -> None:
        try:
            k, v, _ = self.client.fetch(prefix.ns, digest=version.digest)
        except (PrefixMissError, IncompleteError, MismatchError, CommandError) as error:
            # Evicted in between, or (another's) replaced: one clear error, never rows of two.
            if own:
                self.look(prefix)
                self.shared.count("fetches lost to eviction")
            if not isinstance(error, PrefixMissError | IncompleteError | MismatchError):
                fine = _GONE if own else (*_GONE, *_REPLACED)
                known = any(words in str(error) for words in fine)
                self.shared.check("" if known else f"a fetch failed: {str(error)[:300]}")
            return
        self.shared.check(prefix.seen(version, (k, v)))
        self.shared.count("bytes fetched", k.nbytes + v.nbytes)
        if own:
            prefix.used(self.shared.pressure)

    def drop(self) -> None:
        """Gone with the answer."""
        prefix = self._prefix()
        prefix.begin(None)
        self.client.drop(prefix.ns)
        prefix.settle(None, self.shared.pressure)
        if self.rng.random() < 0.5:
            self.look(prefix)

    def export(self) -> None:
        """The file of V.EXPORT holds what a fetch gives."""
        prefix = self._prefix()
        version = self.look(prefix)
        if version is None or version.vquant != "native":
            return
        layers, heads, tokens, size = version.shape
        sids = f"{prefix.ns}_pk", f"{prefix.ns}_pv"
        try:
            path = self.client.call("V.EXPORT", *sids, 0, tokens, layers, heads, size)
            with open(path, "rb") as file:
                data = file.read()
        except (CommandError, FileNotFoundError):  # evicted, or deleted with the next change (or the server) already
            self.shared.count("exports lost")
            self.look(prefix)
            return
        length = 8 + int.from_bytes(data[:8], "little")
        k, v = version.rows()
        want = b"".join(side[layer].tobytes() for layer in range(layers) for side in (k, v))
        if data[length:] != want:
            self.shared.check(f"{prefix.ns} version {version.number}: V.EXPORT gave other words")

    # --- keys -----------------------------------------------------------------------------------------------------

    def _key(self) -> Key:
        return self.rng.choice(self.keys)

    def _value(self) -> bytes:
        return self.rng.randbytes(self.rng.choice((0, 10, 300, 5_000, 40_000)))

    def set(self) -> None:
        """SET, at times with a life time."""
        key, value = self._key(), self._value()
        ttl = self.rng.choice((None, None, None, 1, 4))
        sent = time.monotonic()
        key.begin(value)
        key.may_expire(sent + ttl if ttl else None)
        self.client.call("SET", key.name, value, *(["EX", ttl] if ttl else []))
        key.settle(value, (sent + ttl, time.monotonic() + ttl) if ttl else None)

    def get(self) -> None:
        """GET."""
        self._get(self._key())

    def _get(self, key: Key) -> None:
        asked = time.monotonic()
        value = self.client.call("GET", key.name)
        self.shared.check(key.found(value, asked, time.monotonic()))

    def delete(self) -> None:
        """DEL."""
        key = self._key()
        key.begin(None)
        self.client.call("DEL", key.name)
        key.settle(None)

    def expire(self) -> None:
        """EXPIRE of what may be there."""
        key = self._key()
        ttl = self.rng.choice((1, 3))
        sent = time.monotonic()
        low, high = key.low, key.high
        key.may_expire(sent + ttl)
        if self.client.call("EXPIRE", key.name, ttl):
            key.low, key.high = sent + ttl, time.monotonic() + ttl
        else:
            key.low, key.high = low, high

    def commit(self) -> None:
        """COMMIT."""
        self.client.commit()

    # --- everything -----------------------------------------------------------------------------------------------

    def everything(self) -> None:
        """All that this client wrote, read back."""
        for prefix in self.prefixes:
            version = self.look(prefix)
            if version is not None:
                self._fetch(prefix, version, own=True)
        for key in self.keys:
            self._get(key)
