"""Golden bytes of the ordinary Redis commands over a real server, in RESP2 and RESP3."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from pion import testing
from tests.golden import redis_data, redis_server
from tests.golden.kit import Golden, cmd, matches
from tests.support.replies import Incomplete, parse

CASES = [*redis_data.CASES, *redis_server.CASES]


@pytest.fixture(scope="module")
def server() -> Iterator[testing.Server]:
    with testing.server() as running:
        yield running


class Wire:
    """A connection that returns replies as raw bytes."""

    def __init__(self, server: testing.Server) -> None:
        self.sock = socket.create_connection((server.host, server.port), 20)

    def ask(self, request: bytes) -> bytes:
        self.sock.sendall(request)
        got = b""
        while True:
            try:
                _, rest = parse(got)
            except Incomplete:
                data = self.sock.recv(1 << 16)
                assert data, f"closed after {got!r}"
                got += data
            else:
                assert rest == b"", f"more than one reply: {got!r}"
                return got


@pytest.mark.parametrize("proto", [2, 3])
@pytest.mark.parametrize("golden", CASES, ids=[f"{case.section}: {case.name}" for case in CASES])
def test_golden(server: testing.Server, golden: Golden, proto: int) -> None:
    wire = Wire(server)
    with wire.sock:
        wire.ask(cmd(f"HELLO {proto}"))
        wire.ask(cmd("FLUSHALL"))
        for step in golden.steps:
            expected = step.resp2 if proto == 2 else step.resp3
            got = wire.ask(step.request)
            if golden.name == "hello" and b"HELLO" in step.request:
                expected = step.resp2
            assert matches(expected, got), f"{step.request!r}: {got!r}, not {expected!r}"
