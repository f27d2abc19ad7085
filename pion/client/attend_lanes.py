"""Which way a question about attention takes to the server:

    binary    the server's second port: a header of a few bytes, no parsing of numbers (``wire/fastlane.py``). Fused
              questions only; whatever else is asked, or is refused there, goes over RESP, which says why
    resp      the connections of the client

The third way, ``process``, asks no server: see ``prefix_cache.py``. ``PION_ATTEND_LANE`` in the environment forces one.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final, TypeVar

import numpy as np

from pion.client.address import Address
from pion.client.attend import F32, Attend, Fused, session
from pion.client.connection import Flight, Steps
from pion.client.errors import ConnectionLostError, LaneError
from pion.client.local import NO_INPROC
from pion.client.pool import open_socket
from pion.wire import fastlane
from pion.wire.resp import LocalProtocolError, ReplyError

__all__ = ["LANES", "VARIABLE", "AttendLanes", "BinaryLane"]

log = logging.getLogger("pion.client")

VARIABLE: Final = "PION_ATTEND_LANE"
LANES: Final = ("process", "binary", "resp")
NO_BINARY: Final = "PION_PROMPT_CACHE_NO_BINARY"  # of the published client, as are the two others
NO_FUSED: Final = "PION_DISABLE_FUSED_ATTEND"
_AGAIN: Final = 60.0  # seconds after which a lane that failed is tried again
_IDLE: Final = 4  # connections kept for reuse
_MOST: Final = 4 << 20  # bytes of an answer, header included

T = TypeVar("T")


def is_set(variable: str) -> bool:
    """Whether a switch in the environment is on."""
    return os.environ.get(variable, "").strip().lower() not in ("", "0", "false", "no")


class BinaryLane:
    """Connections to the second port of a server, logged in. Any thread; not those of a parent process.

    Args:
        address: of the server's RESP port.

    Attributes:
        reason: why it is not used now; empty while it may be.
        port: of the lane, once known.
    """

    def __init__(self, address: Address) -> None:
        self.address = address
        self.reason = ""
        self.port: int | None = None
        self._until = 0.0
        self._reset()
        if address.path:
            self._never("the server is reached over a Unix socket")
        elif address.ssl is not None:
            self._never("it has no TLS")
        elif address.username not in (None, "default"):
            self._never("it knows no names of users")
        elif is_set(NO_BINARY):
            self._never(f"{NO_BINARY} is set")

    def _reset(self) -> None:
        self._idle: deque[socket.socket] = deque()
        self._lock = threading.Lock()
        self._pid = os.getpid()

    def _never(self, reason: str) -> None:
        self.reason, self._until = reason, float("inf")

    def off(self, reason: str) -> None:
        """Leave it alone for a while."""
        if not self.reason:
            log.info("%s: the binary lane is not used (%s); questions go over RESP", self.address, reason)
        self.reason, self._until, self.port = reason, time.monotonic() + _AGAIN, None

    @property
    def resting(self) -> bool:
        """Whether it is left alone now."""
        return time.monotonic() < self._until

    def usable(self, asked: Fused) -> bool:
        """Whether this question may be tried there."""
        return not self.resting and asked.q.nbytes + fastlane.HEADER.size <= _MOST

    def ask(self, asked: Fused, sid: bytes) -> tuple[int, Any]:
        """Ask; the status, and the body of the answer.

        Raises:
            OSError: no connection, or it was lost.
            WireError, ValueError: what answers does not speak this protocol.
        """
        request = fastlane.fused_request(
            sid, asked.layer, asked.q, asked.k_suf, asked.v_suf, asked.head_map, asked.window
        )
        sock = self._take()
        while sock is not None:
            try:
                return self._asked(sock, request)
            except OSError:  # the server was started again since; asking twice does no harm
                sock = self._take()
        return self._asked(self._open(), request)

    def _asked(self, sock: socket.socket, request: list[Any]) -> tuple[int, Any]:
        try:
            answer = _exchange(sock, request)
        except BaseException:
            sock.close()
            raise
        with self._lock:
            if len(self._idle) < _IDLE:
                self._idle.append(sock)
                return answer
        sock.close()
        return answer

    def _take(self) -> socket.socket | None:
        if self._pid != os.getpid():
            for sock in self._idle:  # the parent's: closed here without a word on the wire
                sock.close()
            self._reset()
        with self._lock:
            return self._idle.pop() if self._idle else None

    def _open(self) -> socket.socket:
        assert self.port is not None
        where = Address(host=self.address.host, port=self.port, connect_timeout=self.address.connect_timeout)
        sock = open_socket(where)
        try:
            sock.settimeout(self.address.connect_timeout)
            if self.address.password is not None:
                login = fastlane.request(fastlane.Command.AUTH, self.address.password.encode())
                if _exchange(sock, login)[0] not in (fastlane.Status.OK, fastlane.Status.MISS):  # MISS: none is wanted
                    raise ConnectionLostError("the login was refused")
            status, _ = _exchange(sock, fastlane.request(fastlane.Command.PING))
            if status != fastlane.Status.OK:
                raise ConnectionLostError(f"PING was answered with status {status}")
            sock.settimeout(self.address.timeout)
        except BaseException:
            sock.close()
            raise
        return sock

    def close(self) -> None:
        """Close the idle connections."""
        with self._lock:
            while self._idle:
                self._idle.pop().close()


def _exchange(sock: socket.socket, request: list[Any]) -> tuple[int, memoryview]:
    """Send a request and receive its answer."""
    queue = deque(memoryview(piece).cast("B") for piece in request if len(piece))
    while queue:
        sent = sock.sendmsg([queue[i] for i in range(min(len(queue), 64))])
        while sent:
            if sent < len(queue[0]):
                queue[0] = queue[0][sent:]
                break
            sent -= len(queue.popleft())
    status, size = fastlane.parse_reply_header(bytes(_received(sock, fastlane.HEADER.size)))
    if size > _MOST:
        raise ConnectionLostError(f"an answer of {size} bytes was announced")
    return status, _received(sock, size)


def _received(sock: socket.socket, size: int) -> memoryview:
    out = memoryview(bytearray(size))
    got = 0
    while got < size:
        count = sock.recv_into(out[got:])
        if not count:
            raise ConnectionLostError("the server closed the binary lane")
        got += count
    return out


class AttendLanes(Attend):
    """The questions of a blocking client, and the ways they took.

    Args:
        address: the server.
        run: runs a procedure on a connection of the client.

    Attributes:
        forced: the only way that may be taken; empty: any.
        used: how many questions took each way.
        query_ms_total: spent on questions to the server.

    Raises:
        ValueError: ``PION_ATTEND_LANE`` names none, or one that leads nowhere from here.
    """

    def __init__(self, address: Address, run: Callable[[Steps[Any]], Any]) -> None:
        super().__init__()
        self.address = address
        self.binary = BinaryLane(address)
        self.used = dict.fromkeys(LANES, 0)
        self.query_ms_total = 0.0
        self.fused = not is_set(NO_FUSED)
        self._run = run
        self.forced = os.environ.get(VARIABLE, "").strip().lower()
        if self.forced and self.forced not in LANES:
            raise ValueError(f"{VARIABLE}={self.forced!r} is no way to attention (want {', '.join(LANES)})")
        if self.forced == "binary" and self.binary.reason:
            raise ValueError(f"{VARIABLE}=binary: {self.binary.reason}")
        if self.forced == "process" and is_set(NO_INPROC):
            raise ValueError(f"{VARIABLE}=process: {NO_INPROC} is set")

    @property
    def in_process(self) -> bool:
        """Whether K/V that this process holds may be used."""
        return self.forced in ("", "process") and not is_set(NO_INPROC)

    @property
    def calls(self) -> int:
        """Questions to the server."""
        return self.used["binary"] + self.used["resp"]

    def count(self, lane: str, started: float | None = None) -> None:
        """Note that a question took a way."""
        with self._counting:
            self.used[lane] += 1
            if started is not None:
                self.query_ms_total += (time.perf_counter() - started) * 1e3

    def run(self, steps: Steps[T]) -> T:
        """Ask over RESP.

        Raises:
            LaneError: ``PION_ATTEND_LANE=process``.
        """
        if self.forced == "process":
            raise LaneError(f"{VARIABLE}=process: the server is not asked")
        started = time.perf_counter()
        result: T = self._run(steps)
        self.count("resp", started)
        return result

    def ask_fused(self, namespace: str | bytes, asked: Fused, sinks: Any = None) -> F32:
        """Attention over prefix and suffix, (H_q, M, D), the fastest way there is.

        Raises:
            LaneError: the way that ``PION_ATTEND_LANE`` forces cannot be taken.
            AttendError: the server refused.
        """
        refused = ""
        if self.forced in ("", "binary") and sinks is None and self.binary.usable(asked):
            started = time.perf_counter()
            out, refused = self._over_binary(namespace, asked)
            if out is not None:
                self.count("binary", started)
                return out
        if self.forced == "binary":
            why = "sinks are not spoken of there" if sinks is not None else "the question is too large"
            raise LaneError(f"{VARIABLE}=binary: {refused or self.binary.reason or why}")
        answer = self.run(self.query_fused(namespace, asked, sinks))
        if refused:  # but answered here: something is wrong with that lane
            self.binary.off(refused)
        return answer

    def _over_binary(self, namespace: str | bytes, asked: Fused) -> tuple[F32 | None, str]:
        """The answer; or None, and what was said instead of one."""
        lane, sid = self.binary, session(namespace)
        try:
            if lane.port is None:
                found = self._run(_binary_port())
                if found == 0:
                    lane.off("the server has none")
                    return None, ""
                lane.port = found if found > 0 else lane.address.port + 1
            status, body = lane.ask(asked, sid)
            if status == fastlane.Status.COLDMISS:
                kv_heads, _, dim = asked.k_suf.shape
                self._run(self.rehydrate(namespace, kv_heads, dim, "COLDMISS"))
                status, body = lane.ask(asked, sid)
        except LocalProtocolError as error:  # a number that has no room there
            return None, str(error)
        except (OSError, fastlane.WireError) as error:
            lane.off(str(error) or repr(error))
            return None, ""
        if status == fastlane.Status.ERROR:  # RESP says why, or answers
            return None, f"layer {asked.layer} of session {sid!r} was refused; why, that lane cannot say, but RESP does"
        if status != fastlane.Status.OK or len(body) != asked.q.nbytes:
            return None, f"a question was answered with status {int(status)} and {len(body)} bytes"
        return np.frombuffer(body, "<f4").reshape(asked.q.shape), ""

    def described(self) -> dict[str, Any]:
        """For ``stats()``."""
        with self._counting:
            return {
                "lanes": dict(self.used),
                "queries": self.used["binary"] + self.used["resp"],
                "query_ms_total": self.query_ms_total,
                "cold_rehydrates": self.cold_rehydrates,
                "binary_off": self.binary.reason if self.binary.resting else "",
            }

    def close(self) -> None:
        """Close the connections of the binary lane."""
        self.binary.close()


def _binary_port() -> Steps[int]:
    """The port of the binary lane of a server; 0: it has none; -1: it does not say, as the original, where it is the
    next one."""
    (info,) = yield Flight([["INFO", "server"]])
    if isinstance(info, ReplyError) or not isinstance(info, bytes | str):
        return -1
    text = info.decode("utf-8", "replace") if isinstance(info, bytes) else str(info)
    for line in text.split("\r\n"):
        name, _, value = line.partition(":")
        if name == "binary_port":
            with contextlib.suppress(ValueError):
                return int(value)
    return -1
