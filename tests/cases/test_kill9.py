"""SIGKILL at any moment of a stream of STOREBATCH, SET and DROP; B5, B7 and B12 in one.

After the restart every acknowledged row is there bit for bit, nothing dropped is back, no partial declared prefix is a
HIT and the first INFO tells the true sizes.
"""

from __future__ import annotations

import random
import select
import socket
from pathlib import Path

import pytest

from tests.cases.crashmodel import Model, Op
from tests.support.process import Process
from tests.support.raw import Raw

DEADLINE = 30.0


def _expected(op: Op, line: bytes) -> bool:
    if op.refused:
        return line == b"-ERR session not found"
    return line == b"+OK" or line[:1] == b":"


class Stream:
    """The operations on their way; replies are read as they come, so that neither side ever waits for the other."""

    def __init__(self, port: int, ops: list[Op]) -> None:
        self.ops = ops
        self.ends: list[int] = []
        total = 0
        for op in ops:
            total += len(op.request)
            self.ends.append(total)
        self.data = memoryview(b"".join(op.request for op in ops))
        self.sent_bytes = 0
        self.replies = bytearray()
        self.sock = socket.create_connection(("127.0.0.1", port))
        self.sock.setblocking(False)

    @property
    def sent(self) -> int:
        return sum(1 for end in self.ends if end <= self.sent_bytes)

    @property
    def acked(self) -> int:
        return self.replies.count(b"\r\n")

    def pump(self, until_bytes: int, until_acks: int) -> None:
        """Sends and reads until both marks are reached."""
        while self.sent_bytes < until_bytes or self.acked < until_acks:
            writers = [self.sock] if self.sent_bytes < until_bytes else []
            readable, writable, _ = select.select([self.sock], writers, [], DEADLINE)
            assert readable or writable, f"stuck: {self.sent_bytes} bytes sent, {self.acked} replies"
            if readable:
                piece = self.sock.recv(1 << 16)
                assert piece, "the server closed the connection"
                self.replies += piece
            if writable:
                end = min(until_bytes, self.sent_bytes + (1 << 18))
                self.sent_bytes += self.sock.send(self.data[self.sent_bytes : end])

    def finish(self) -> None:
        """Reads what the dead server had still sent."""
        self.sock.settimeout(DEADLINE)
        try:
            while piece := self.sock.recv(1 << 16):
                self.replies += piece
        except ConnectionResetError:
            pass
        finally:
            self.sock.close()
        for op, line in zip(self.ops, self.replies.split(b"\r\n")[:-1], strict=False):
            assert _expected(op, line), (op.request[:80], line)


def _round(process: Process, model: Model) -> None:
    ops = model.ops(model.rng.randint(10, 120))
    with Raw(process.port) as conn:
        assert conn.call("PING") == "PONG"
    stream = Stream(process.port, ops)
    if model.rng.random() < 0.5:
        stream.pump(model.rng.randrange(len(stream.data) + 1), 0)  # in the middle of a request, mostly
    else:
        acks = model.rng.randrange(len(ops) + 1)  # right behind a reply
        stream.pump(len(stream.data), acks)
    process.kill()
    stream.finish()
    process.start()
    with Raw(process.port) as conn:
        model.check(conn, ops, stream.acked, stream.sent)


def _rounds(directory: Path, seed: int, count: int) -> None:
    model = Model(random.Random(seed))
    with Process(directory) as process:
        for _ in range(count):
            _round(process, model)


@pytest.mark.parametrize("seed", range(3))
def test_b5_b7_b12_kill9_at_ten_random_points(tmp_path: Path, seed: int) -> None:
    _rounds(tmp_path / "data", seed, 10)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3, 20))
def test_b5_b7_b12_kill9_at_ten_more_random_points(tmp_path: Path, seed: int) -> None:
    _rounds(tmp_path / "data", seed, 10)
