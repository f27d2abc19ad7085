"""What the server knows about itself besides the data: clock of its life, counters, slow log, pause, memory gate.

The network layer owns one `ServerState`, calls `tick` ten times a second and fills in the hooks. Without hooks (the
embedding API, tests) everything still works: threads become plain calls and SHUTDOWN is refused.
"""

from __future__ import annotations

import secrets
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any

from pion import limits
from pion.commands.attention import Attention
from pion.commands.commits import GroupCommit
from pion.commands.computing import Computing
from pion.commands.fastlane import Figures
from pion.commands.scan import ScanCache
from pion.errors import CommandError

_FAST_COMMAND_US = 1000  # a slow log from this threshold on would not see a fast command
_SAMPLES = 16  # of a tenth of a second each, as Redis averages its instantaneous figures


@dataclass(slots=True)
class CommandStats:
    """One line of `# Commandstats`; times in microseconds."""

    calls: int = 0
    usec: int = 0
    rejected: int = 0
    failed: int = 0


@dataclass(slots=True)
class SlowEntry:
    """One slow command: wall-clock second, duration and the shortened arguments."""

    ident: int
    at: int
    usec: int
    argv: list[bytes]
    peer: str
    name: str


class SlowLog:
    """Redis's slow log: a ring of the commands that took at least `threshold_us` (negative = off, 0 = all)."""

    def __init__(self) -> None:
        self.threshold_us = limits.SLOWLOG_SLOWER_THAN_US
        self._entries: deque[SlowEntry] = deque(maxlen=limits.SLOWLOG_MAX_LEN)
        self._next = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def max_len(self) -> int:
        """Entries kept; setting it drops the oldest."""
        return self._entries.maxlen or 0

    @max_len.setter
    def max_len(self, value: int) -> None:
        self._entries = deque(list(self._entries)[:value], maxlen=value)

    def note(self, argv: list[Any], usec: int, peer: str, name: str) -> None:
        """Keeps the command when it was slow enough."""
        if self.threshold_us < 0 or usec < self.threshold_us:
            return
        self._entries.appendleft(SlowEntry(self._next, int(time.time()), usec, _shorten(argv), peer, name))
        self._next += 1

    def latest(self, count: int) -> list[SlowEntry]:
        """The newest `count` entries, newest first; negative = all."""
        entries = list(self._entries)
        return entries if count < 0 else entries[:count]

    def clear(self) -> None:
        """Forgets the entries; numbers go on."""
        self._entries.clear()


def _shorten(argv: list[Any]) -> list[bytes]:
    """At most 32 arguments of 128 bytes; a streamed body is named by its size, a password never kept."""
    name = bytes(argv[0]).lower()
    if name == b"auth" or (name == b"hello" and len(argv) > 2):
        argv = [argv[0], *[b"(redacted)"] * (len(argv) - 1)]
    if name == b"config" and len(argv) > 2 and any(bytes(arg).lower() == b"requirepass" for arg in argv[2::2]):
        argv = [*argv[:2], *[b"(redacted)"] * (len(argv) - 2)]
    out = []
    for arg in argv[: limits.SLOWLOG_MAX_ARGC]:
        raw = arg if isinstance(arg, bytes) else b"(streamed body)"
        if len(raw) > limits.SLOWLOG_MAX_STRING:
            raw = raw[: limits.SLOWLOG_MAX_STRING] + b"... (%d more bytes)" % (len(raw) - limits.SLOWLOG_MAX_STRING)
        out.append(raw)
    if len(argv) > limits.SLOWLOG_MAX_ARGC:
        out[-1] = b"... (%d more arguments)" % (len(argv) - limits.SLOWLOG_MAX_ARGC + 1)
    return out


async def _inline(fn: Callable[..., Any], *args: Any) -> Any:
    """The default of `ServerState.to_thread`: call here and now."""
    return fn(*args)


def memory_bytes() -> tuple[int, int]:
    """(anonymous resident bytes, resident bytes) of this process, as the kernel counts them."""
    try:
        with open("/proc/self/status", "rb") as status:
            fields = dict(line.split(b":", 1) for line in status if line.startswith((b"RssAnon", b"VmRSS")))
        rss = int(fields[b"VmRSS"].split()[0]) * 1024
        return int(fields.get(b"RssAnon", fields[b"VmRSS"]).split()[0]) * 1024, rss
    except (OSError, KeyError):
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        value = peak if sys.platform == "darwin" else peak * 1024
        return value, value


@dataclass(eq=False)
class ServerState:
    """See the module text.

    Attributes:
        to_thread: `await to_thread(fn, *args)` runs a blocking call off the event loop.
        commit: flushes for the commands that wait for the medium.
        to_waiting_thread: the same for calls that wait for others which themselves need threads.
        computing: threads for calls that keep a core busy.
        attention: the attention engine, made when it is first needed.
        spawn: starts `async_fn()` in the background.
        new_event: makes an event with `set()` and `await wait()`; needed for CLIENT PAUSE.
        shut_down: called once with `save: bool` by SHUTDOWN.
        port: the bound TCP port.
        lane: path of the socket that hands out descriptors of entry files; empty: there is none.
        no_lane: why not.
        binary: figures of the binary lane.
    """

    to_thread: Callable[..., Awaitable[Any]] = _inline
    commit: GroupCommit = field(default_factory=GroupCommit)
    to_waiting_thread: Callable[..., Awaitable[Any]] = _inline
    computing: Computing | None = None
    attention: Attention = field(default_factory=Attention)
    spawn: Callable[[Callable[[], Awaitable[Any]]], None] | None = None
    new_event: Callable[[], Any] | None = None
    shut_down: Callable[[bool], None] | None = None
    plane: Any = None
    engine: Any = None
    port: int = 0
    lane: str = ""
    no_lane: str = "--lane off"
    binary: Figures = field(default_factory=Figures)
    maxmemory: int = 0
    maxmemory_policy: str = "noeviction"
    maxclients: int = limits.DEFAULT_MAXCLIENTS
    run_id: str = field(default_factory=lambda: secrets.token_hex(20))
    started: float = field(default_factory=time.monotonic)
    started_unix: int = field(default_factory=lambda: int(time.time()))
    slowlog: SlowLog = field(default_factory=SlowLog)
    scans: ScanCache = field(default_factory=ScanCache)
    commands: dict[str, CommandStats] = field(default_factory=dict)
    error_counts: dict[str, int] = field(default_factory=dict)
    commands_processed: int = 0
    peak_memory: int = 0
    last_save: int = field(default_factory=lambda: int(time.time()))
    last_save_ok: bool = True
    saving: bool = False
    saved_changes: int = 0
    paused: str | None = None
    _pause_end: float = 0.0
    _unpaused: Any = None
    _samples: deque[tuple[float, int, int, int]] = field(default_factory=lambda: deque(maxlen=_SAMPLES))

    @property
    def uptime(self) -> int:
        """Whole seconds since the start."""
        return int(time.monotonic() - self.started)

    # --- memory gate -----------------------------------------------------------------------------------------------

    @property
    def data_bytes(self) -> int:
        """What `maxmemory` is compared with: the ordinary keyspace's own count of its bytes."""
        return int(self.engine.keyspace.used_bytes) if self.engine is not None else 0

    def bound_memory(self, nbytes: int, policy: str) -> None:
        """Bounds the keyspace and evicts at once what is above; see `Keyspace.bound`."""
        self.maxmemory, self.maxmemory_policy = nbytes, policy
        if self.engine is not None:
            self.engine.keyspace.bound(nbytes, policy)
            self.engine.keyspace.make_room()

    @property
    def refusing_writes(self) -> bool:
        """True when commands that may grow the keyspace are refused: it is above its bound and nothing may go."""
        return self.engine is not None and not self.engine.keyspace.make_room()

    # --- pause -----------------------------------------------------------------------------------------------------

    def pause(self, milliseconds: int, mode: str) -> None:
        """Holds back commands (`all`) or writes (`write`) of every client for a while; the longer pause wins.

        Raises:
            CommandError: when there is no event loop that could hold them.
        """
        if self.new_event is None:
            raise CommandError("ERR CLIENT PAUSE needs a running server")
        end = time.monotonic() + milliseconds / 1000
        if self.paused is None:
            self._unpaused = self.new_event()
        self._pause_end = max(end, self._pause_end) if self.paused else end
        self.paused = "all" if "all" in (mode, self.paused) else "write"
        self.choose_door()

    def unpause(self) -> None:
        """Lets the held commands run."""
        if self.paused is None:
            return
        self.paused = None
        self.choose_door()
        self._unpaused.set()

    def choose_door(self) -> None:
        """Lets the plane run fast commands itself, unless a pause holds them or the slow log wants every one."""
        if self.plane is not None:
            logs_everything = 0 <= self.slowlog.threshold_us < _FAST_COMMAND_US
            self.plane.fast_enabled = self.paused is None and not logs_everything

    def holds(self, write: bool) -> bool:
        """True when a command must wait for the end of a pause."""
        if self.paused is None:
            return False
        if time.monotonic() >= self._pause_end:
            self.unpause()
            return False
        return write or self.paused == "all"

    async def wait_unpaused(self) -> None:
        """Returns when the pause that is on now has ended."""
        await self._unpaused.wait()

    # --- time ------------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Ten times a second: end of a pause, samples of the instantaneous figures."""
        if self.paused is not None and time.monotonic() >= self._pause_end:
            self.unpause()
        stats = self.plane.stats if self.plane is not None else {}
        self._samples.append(
            (time.monotonic(), self.total_commands(), int(stats.get("net_in", 0)), int(stats.get("net_out", 0)))
        )

    def total_commands(self) -> int:
        """Commands run so far, those of the C fast path included."""
        if self.plane is not None:
            return int(self.plane.stats["commands_processed"])
        return self.commands_processed

    def command_stats(self) -> dict[str, CommandStats]:
        """Calls by command name, those of the C fast path added (their time is not taken)."""
        out = {name: replace(stats) for name, stats in self.commands.items()}
        fast = self.plane.stats["fast_calls"] if self.plane is not None else {}
        for name, calls in fast.items():
            if calls:
                out.setdefault(name.decode(), CommandStats()).calls += calls
        return out

    def rates(self) -> tuple[int, float, float]:
        """(commands, KB in, KB out) per second over the last 1.6 seconds."""
        if len(self._samples) < 2:
            return 0, 0.0, 0.0
        (t0, c0, i0, o0), (t1, c1, i1, o1) = self._samples[0], self._samples[-1]
        span = max(t1 - t0, 1e-3)
        return int((c1 - c0) / span), (i1 - i0) / span / 1024, (o1 - o0) / span / 1024

    def memory(self) -> tuple[int, int]:
        """(anonymous, resident) bytes now; keeps the peak."""
        anonymous, resident = memory_bytes()
        self.peak_memory = max(self.peak_memory, anonymous)
        return anonymous, resident

    def reset_stats(self) -> None:
        """CONFIG RESETSTAT: zeroes what `# Stats`, `# Commandstats` and `# Errorstats` show."""
        self.commands.clear()
        self.error_counts.clear()
        self.commands_processed = 0
        self.peak_memory = 0
        self._samples.clear()
        if self.plane is not None:
            self.plane.reset_stats()
        if self.engine is not None:
            self.engine.keyspace.reset_stats()
