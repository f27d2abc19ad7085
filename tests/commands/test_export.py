"""V.EXPORT over real sockets: who may ask, for what, and what is left on the disk."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pion.commands.export import is_loopback
from pion.testing import server as start_server
from tests.support.raw import Raw, ReplyError


def fill(conn: Raw, ns: str) -> None:
    for side in ("_pk", "_pv"):
        conn.ok("V.CREATE", ns + side, 8, "VQUANT", "fp16")
        conn.ok("V.STOREBATCH", ns + side, 0, 0, 4, bytes(64), "FMT", "F16")


def ask(ns: str) -> tuple[object, ...]:
    return "V.EXPORT", f"{ns}_pk", f"{ns}_pv", 0, 4, 1, 2, 4


def test_the_file_ends_with_the_session_and_with_the_server(tmp_path: Path) -> None:
    with start_server("--kvcache", dir=tmp_path / "data") as server:
        with Raw(server.port) as conn:
            fill(conn, "ns")
            fill(conn, "other")
            path, kept = conn.ok(*ask("ns")).decode(), conn.ok(*ask("other")).decode()
            assert os.path.getsize(path) == os.path.getsize(kept)
            assert conn.ok("KV.PREFIX.DROP", "ns") == 1
            poll(lambda: not os.path.exists(path))
            refused = conn.call(*ask("ns"))
            assert isinstance(refused, ReplyError)
            assert conn.call("PING") == "PONG"
        assert server.stop() == 0
        assert not os.path.exists(kept)
        assert list((tmp_path / "data" / "export").iterdir()) == []


def test_what_a_kill_leaves_goes_at_the_next_start(tmp_path: Path) -> None:
    with start_server("--kvcache", dir=tmp_path / "data") as server:
        with Raw(server.port) as conn:
            fill(conn, "ns")
            path = conn.ok(*ask("ns")).decode()
        server.kill()
        assert os.path.exists(path)
        server.restart()
        assert not os.path.exists(path)
        with Raw(server.port) as conn:
            assert conn.ok(*ask("ns")).decode() != path


def poll(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_only_namespaces_of_the_required_prefix(tmp_path: Path) -> None:
    with start_server("--kvcache", "--ns-prefix", "mine:", dir=tmp_path) as server, Raw(server.port) as conn:
        fill(conn, "mine:a")
        fill(conn, "yours:a")
        assert conn.ok(*ask("mine:a")).endswith(b".safetensors")
        for sids in (("yours:a_pk", "yours:a_pv"), ("mine:a_pk", "yours:a_pv"), ("yours:a_pk", "mine:a_pv")):
            refused = conn.call("V.EXPORT", *sids, 0, 4, 1, 2, 4)
            assert isinstance(refused, ReplyError)
            assert "required prefix" in str(refused)


def address() -> str:
    """An address of this machine that is not loopback; none needs a network for that."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this machine has loopback only")
        return str(probe.getsockname()[0])


def test_only_a_client_on_this_machine(tmp_path: Path) -> None:
    here = address()
    flags = ("--kvcache", "--bind", f"127.0.0.1,{here}", "--insecure-no-auth", "--unixsocket", str(tmp_path / "s"))
    with start_server(*flags) as server:
        with Raw(server.port) as conn:
            fill(conn, "ns")
            path = conn.ok(*ask("ns"))
        with socket.create_connection((here, server.port)) as sock:
            sock.sendall(b" ".join(str(word).encode() for word in ask("ns")) + b"\r\n")
            assert sock.recv(200).startswith(b"-ERR V.EXPORT: only a client on the server's machine")
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(str(tmp_path / "s"))
            sock.sendall(b" ".join(str(word).encode() for word in ask("ns")) + b"\r\n")
            assert path in sock.recv(300)


@pytest.mark.parametrize(
    ("peer", "local"),
    [
        ("127.0.0.1:5", True),
        ("127.8.9.1:5", True),
        ("[::1]:5", True),
        ("[::ffff:127.0.0.1]:5", True),
        ("10.0.0.1:5", False),
        ("[::ffff:10.0.0.1]:5", False),
        ("[fe80::1%lo]:5", False),
        ("localhost:5", False),
        ("127.0.0.1.example:5", False),
        ("", False),
    ],
)
def test_addresses(peer: str, local: bool) -> None:
    assert is_loopback(peer) is local
