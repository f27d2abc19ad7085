"""The binary lane while it computes, and its ends."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from pion import testing
from tests.support import attend
from tests.support.attention import normal
from tests.support.binary import (
    ERROR,
    FUSED,
    OK,
    PING,
    Array,
    Binary,
    ask,
    beside,
    frame,
    fused_body,
    lane,
    one_key,
    until,
)
from tests.support.raw import Raw


@pytest.fixture(scope="module")
def server() -> Iterator[testing.Server]:
    with testing.server("--kvcache") as running:
        yield running


def long_query(conn: Raw) -> tuple[Array, Array]:
    k, q = normal(1, 8, 6000, 64), normal(3, 8, 800, 64)
    assert attend.store(conn, "long", 0, k, k) == "OK"
    return q, np.zeros((8, 0, 64), np.float32)


def test_a_computation_does_not_hold_up_others(server: testing.Server) -> None:
    with Raw(server.port) as conn, Binary(lane(server), timeout=60) as binary, Binary(lane(server)) as other:
        q, none = long_query(conn)
        binary.send(frame(FUSED, fused_body("long", 0, q, none, none, range(8))))
        binary.sock.setblocking(False)
        answered = 0
        while True:
            try:
                if binary.sock.recv(1, socket.MSG_PEEK):
                    break
            except BlockingIOError:
                assert conn.call("PING") == "PONG"
                assert other.call(PING) == (OK, b"")
                answered += 1
        assert answered >= 10


def test_an_end_in_the_middle_of_a_computation() -> None:
    """A response that is due still leaves, and the process ends with status 0."""
    got: list[Any] = []
    with testing.server("--kvcache", timeout=120) as server, Raw(server.port) as conn:
        q, none = long_query(conn)
        port = lane(server)

        def call() -> None:
            with Binary(port, timeout=60) as binary:
                got.append(binary.fused("long", 0, q, none, none, range(8)))

        thread = threading.Thread(target=call)
        with Binary(port) as idle:
            idle.call(PING)
            thread.start()
            until(lambda: conn.fields("ATTEND.PREFIX.INFO")["sdpa_queries"] != "0")
            assert server.stop() == 0
            thread.join()
            assert idle.ended()
        assert got[0].shape == q.shape
        assert "Traceback" not in server.output
        with pytest.raises(ConnectionRefusedError):
            Binary(port)


def test_clients_that_leave_before_their_answer() -> None:
    with testing.server("--kvcache") as server, Raw(server.port) as conn:
        q, none = long_query(conn)
        port = lane(server)
        for _ in range(5):
            with Binary(port) as binary:
                binary.send(frame(FUSED, fused_body("long", 0, q[:, :50], none, none, range(8))))
        with Binary(port) as binary:
            binary.send(frame(FUSED, fused_body("long", 0, q[:, :50], none, none, range(8))))
            address = "{}:{}".format(*binary.sock.getsockname())
            line = re.compile(rf"addr={address} .*cmd=attend\.prefix\.query_fused ")
            until(lambda: line.search(conn.ok("CLIENT", "LIST").decode()))
            conn.ok("CLIENT", "KILL", "LADDR", f"127.0.0.1:{port}")
            assert binary.ended()
        until(lambda: conn.fields("INFO", "clients")["binary_clients"] == "0")
        one_key(conn)
        assert (ask(port) == 1.0).all()
        assert "Traceback" not in server.output


def test_a_kill_and_a_restart(tmp_path: Any) -> None:
    q = normal(3, 2, 1, 64)
    none = np.zeros((2, 0, 64), np.float32)
    with beside(dir=tmp_path) as server:
        port = lane(server)
        with Raw(server.port) as conn:
            attend.prefix(conn, "ns", 1, 50, 2, 64)
            conn.ok("KV.PREFIX.COMMIT", "ns")
            conn.ok("KV.PREFIX.WARM", "ns", 2, 64, "ns_attn")
        with Binary(port) as binary:
            want = binary.fused("ns_attn", 0, q, none, none, [0, 1])
            server.kill()
            assert binary.ended()
        server.restart()
        with Raw(server.port) as conn:
            assert int(conn.fields("INFO", "server")["binary_port"]) == port
            with Binary(port) as binary:
                assert binary.fused("ns_attn", 0, q, none, none, [0, 1]) == ERROR, "missing, as over RESP"
                conn.ok("KV.PREFIX.WARM", "ns", 2, 64, "ns_attn")
                assert np.array_equal(binary.fused("ns_attn", 0, q, none, none, [0, 1]), want)
