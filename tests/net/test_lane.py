"""KV.PREFIX.LANE: entry files handed to clients on the same machine, over real sockets."""

from __future__ import annotations

import fcntl
import mmap
import os
import socket
import stat
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pion import limits
from pion.errors import StartupError
from pion.net import lane
from pion.testing import server as start_server
from tests.support.lane import ask, show, told
from tests.support.raw import Raw, ReplyError

ROWS, DIM, LAYERS = 40, 64, 3


def body(side: int, layer: int, salt: int = 0, rows: int = ROWS) -> bytes:
    return bytes((7 * side + 31 * layer + salt + at) % 249 for at in range(2 * rows * DIM))


def fill(conn: Raw, ns: str, salt: int = 0, *, rows: int = ROWS, replace: bool = False, stored: int = LAYERS) -> None:
    words = ["ROWS", rows, "LAYERS", LAYERS, "DIGEST", f"{salt:02x}" * 8, *(["REPLACE"] if replace else [])]
    conn.ok("KV.PREFIX.REGISTER", ns, DIM, "fp16", *words)
    for layer in range(stored):
        for side in range(2):
            sid = ns + ("_pk", "_pv")[side]
            conn.ok("V.STOREBATCH", sid, layer, 0, rows, body(side, layer, salt, rows), "FMT", "F16")


def poll(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.fixture(params=["disk", "memory"])
def flags(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, object]:
    """The data directory, or none."""
    return {"dir": tmp_path / "data"} if request.param == "disk" else {}


def test_one_descriptor_that_can_only_read(flags: dict[str, object]) -> None:
    with start_server("--kvcache", *([] if flags else ["--memory-only"]), **flags) as server, Raw(server.port) as conn:
        fill(conn, "ns")
        conn.ok("SSM.PREFIX.STORE", "ns", 4, b"a state")
        offer = ask(conn, "ns")
        assert stat.S_IMODE(os.stat(offer.path).st_mode) == 0o700
        assert offer.fields["rows"] == ROWS
        assert offer.fields["digest"] == b"00" * 8
        answer, fd = show(offer.path, offer.ticket)
        try:
            assert answer == b"+"
            assert fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
            with pytest.raises(PermissionError):
                mmap.mmap(fd, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE)
            with pytest.raises(OSError, match="Bad file descriptor"):
                os.write(fd, b"x")
            assert os.fstat(fd).st_mode & 0o777 == 0o600
            for side in range(2):
                assert [offer.rows(fd, side, layer) for layer in range(LAYERS)] == [
                    body(side, layer) for layer in range(LAYERS)
                ]
            number, offset, nbytes = offer.fields["states"]
            assert (number, os.pread(fd, nbytes, offset)) == (4, b"a state")
        finally:
            os.close(fd)


def test_the_reply_in_both_protocols(tmp_path: Path) -> None:
    with start_server("--kvcache", dir=tmp_path) as server, Raw(server.port) as conn:
        fill(conn, "ns")
        flat = conn.ok("KV.PREFIX.LANE", "ns")
        assert isinstance(flat, list)
        assert [bytes(name) for name in flat[::2]] == [
            b"socket", b"ticket", b"generation", b"digest", b"rows", b"heads", b"keys", b"values", b"states",
        ]  # fmt: skip
        conn.ok("HELLO", 3)
        named = conn.ok("KV.PREFIX.LANE", "ns")
        assert isinstance(named, dict)
        one, other = told(flat), told(named)
        assert one.sides == other.sides
        assert one.ticket != other.ticket


def test_a_ticket_is_good_once_and_for_seconds(tmp_path: Path) -> None:
    with start_server("--kvcache", dir=tmp_path) as server, Raw(server.port) as conn:
        fill(conn, "ns")
        offer, late = ask(conn, "ns"), ask(conn, "ns")
        answer, fd = show(offer.path, offer.ticket)
        os.close(fd)
        assert answer == b"+"
        assert show(offer.path, offer.ticket) == (b"-no such ticket\n", -1)
        time.sleep(limits.LANE_TICKET_SECONDS + 0.2)
        assert show(late.path, late.ticket) == (b"-no such ticket\n", -1)


def test_only_the_last_tickets_are_remembered(tmp_path: Path) -> None:
    with start_server("--kvcache", dir=tmp_path) as server, Raw(server.port) as conn:
        fill(conn, "ns")
        first = ask(conn, "ns")
        for _ in range(limits.LANE_TICKETS):
            last = ask(conn, "ns")
        assert show(first.path, first.ticket)[1] == -1
        answer, fd = show(last.path, last.ticket)
        assert answer == b"+"
        os.close(fd)


@pytest.mark.parametrize("garbage", [b"", b"\n", b"x" * 200, b"\x00\xff" * 30 + b"\n", b"*1\r\n$4\r\nPING\r\n"])
def test_garbage_gets_nothing(tmp_path: Path, garbage: bytes) -> None:
    with start_server("--kvcache", dir=tmp_path) as server, Raw(server.port) as conn:
        fill(conn, "ns")
        offer = ask(conn, "ns")
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(10)
            sock.connect(offer.path)
            sock.sendall(garbage)
            sock.shutdown(socket.SHUT_WR)
            answer, ancillary, _, _ = sock.recvmsg(200, socket.CMSG_SPACE(64))
            assert (answer, ancillary) == (b"-no such ticket\n", [])
        answer, fd = show(offer.path, offer.ticket)
        assert answer == b"+"
        os.close(fd)


def test_clients_that_say_nothing_are_bounded_and_sent_away(tmp_path: Path) -> None:
    with start_server("--kvcache", dir=tmp_path) as server, Raw(server.port) as conn:
        fill(conn, "ns")
        offer = ask(conn, "ns")
        silent = []
        for _ in range(limits.LANE_CLIENTS):
            sock = socket.socket(socket.AF_UNIX)
            sock.settimeout(10)
            sock.connect(offer.path)
            silent.append(sock)
        time.sleep(0.3)
        try:
            with pytest.raises((ConnectionError, AssertionError)):  # one more is closed at once
                assert show(offer.path, offer.ticket)[0]
            assert conn.call("PING") == "PONG"
            assert all(sock.recv(10) == b"" for sock in silent)  # after their time
            offer = ask(conn, "ns")
            answer, fd = show(offer.path, offer.ticket)
            assert answer == b"+"
            os.close(fd)
        finally:
            for sock in silent:
                sock.close()


def test_no_descriptor_stays_behind(tmp_path: Path) -> None:
    with start_server("--kvcache", dir=tmp_path) as server, Raw(server.port) as conn:
        fill(conn, "ns")
        where = f"/proc/{server.pid}/fd" if sys.platform == "linux" else ""
        if not where:
            pytest.skip("needs /proc")
        for turn in range(60):
            if turn == 10:
                before = len(os.listdir(where))
            offer = ask(conn, "ns")
            if turn % 3:
                _, fd = show(offer.path, offer.ticket if turn % 3 == 1 else b"no")
                if fd >= 0:
                    os.close(fd)
        poll(lambda: len(os.listdir(where)) <= before + 1)


def test_who_gets_what(tmp_path: Path) -> None:
    with start_server("--kvcache", "--ns-prefix", "mine:", dir=tmp_path) as server, Raw(server.port) as conn:
        fill(conn, "mine:a")
        fill(conn, "mine:b", stored=LAYERS - 1)
        for ns, text in (
            ("yours:a", "must start with required prefix"),
            ("mine:none", "session not found"),
            ("mine:b", "complete"),
        ):
            refused = conn.call("KV.PREFIX.LANE", ns)
            assert isinstance(refused, ReplyError)
            assert text in str(refused)
        conn.ok("KV.PREFIX.REGISTER", "mine:c", DIM, "fp16")
        assert "ROWS and LAYERS" in str(conn.call("KV.PREFIX.LANE", "mine:c"))
        assert ask(conn, "mine:a").ticket
    with (
        start_server("--kvcache", "--requirepass", "secret", dir=tmp_path / "other") as server,
        Raw(server.port) as conn,
    ):
        assert "NOAUTH" in str(conn.call("KV.PREFIX.LANE", "mine:a"))


@pytest.mark.parametrize("end", ["drop", "replace"])
def test_an_entry_that_ends_between_ticket_and_use(tmp_path: Path, end: str) -> None:
    with start_server("--kvcache", dir=tmp_path) as server, Raw(server.port) as conn:
        fill(conn, "ns")
        offer = ask(conn, "ns")
        if end == "drop":
            conn.ok("KV.PREFIX.DROP", "ns")
        else:
            fill(conn, "ns", 9, replace=True)
        assert show(offer.path, offer.ticket) == (b"-the prefix is gone\n", -1)


def mapped(offer: object, fd: int) -> mmap.mmap:
    try:
        return mmap.mmap(fd, 0, prot=mmap.PROT_READ)
    finally:
        os.close(fd)


@pytest.mark.parametrize("end", ["drop", "replace", "trim", "compact", "append", "kill"])
def test_what_was_handed_out_stays_as_it_is(flags: dict[str, object], end: str) -> None:
    if end == "kill" and not flags:
        pytest.skip("nothing outlives a server in memory")
    with start_server("--kvcache", *([] if flags else ["--memory-only"]), **flags) as server:
        with Raw(server.port) as conn:
            fill(conn, "ns")
            snap = conn.ok("V.SNAPSHOT", "ns_pk")
            offer = ask(conn, "ns")
            held = mapped(offer, show(offer.path, offer.ticket)[1])
            before = bytes(held)
            if end == "drop":
                conn.ok("KV.PREFIX.DROP", "ns")
            elif end == "replace":
                fill(conn, "ns", 9, replace=True)
            elif end == "trim":
                conn.ok("V.RESTORE", "ns_pk", snap)
                conn.ok("V.STOREBATCH", "ns_pk", 0, 0, ROWS, body(0, 0, 5), "FMT", "F16")
            elif end == "compact":
                for salt in range(1, 300):  # more than 1 MiB of dead bytes: the file is written anew
                    conn.ok("V.STOREBATCH", "ns_pk", 0, 0, ROWS, body(0, 0, salt), "FMT", "F16")
                poll(lambda: ask(conn, "ns").fields["generation"] != offer.fields["generation"])
            elif end == "append":
                conn.ok("V.STOREBATCH", "ns_pk", 1, 0, ROWS, body(0, 1, 77), "FMT", "F16")
        if end == "kill":
            server.kill()
            server.restart()
            with Raw(server.port) as conn:
                again = ask(conn, "ns")
                fd = show(again.path, again.ticket)[1]
                assert again.rows(fd, 1, 2) == body(1, 2)
                os.close(fd)
        assert bytes(held) == before
        held.close()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can tell who maps a file")
def test_dropped_files_count_while_clients_map_them(tmp_path: Path) -> None:
    with start_server("--kvcache", dir=tmp_path) as server, Raw(server.port) as conn:
        fill(conn, "ns")

        offer = ask(conn, "ns")
        held = mapped(offer, show(offer.path, offer.ticket)[1])
        full = held_bytes(conn)
        assert full > 0
        conn.ok("KV.PREFIX.DROP", "ns")
        time.sleep(2.5)
        assert held_bytes(conn) == full
        held.close()
        poll(lambda: held_bytes(conn) == 0)


def held_bytes(conn: Raw) -> int:
    """Bytes of entry files, with those of removed ones that somebody holds."""
    lines = conn.ok("KV.PREFIX.INFO").decode().split("\r\n")
    return int(dict(line.split(":", 1) for line in lines if ":" in line)["vstore_file_bytes"])


def test_where_the_socket_is_and_that_it_goes(tmp_path: Path) -> None:
    deep = tmp_path / ("deep" * 20) / ("er" * 20)
    with start_server("--kvcache", dir=deep) as server, Raw(server.port) as conn:
        fill(conn, "ns")
        path = ask(conn, "ns").path
        assert not path.startswith(str(deep))
        assert stat.S_IMODE(os.stat(os.path.dirname(path)).st_mode) == 0o700
        server.kill()  # leaves it behind
    with start_server("--kvcache", "--lane", str(tmp_path / "mine"), dir=tmp_path / "a") as server:
        with Raw(server.port) as conn:
            fill(conn, "ns")
            assert ask(conn, "ns").path == str(tmp_path / "mine")
        server.kill()
        assert (tmp_path / "mine").exists()
        server.restart()  # a stale socket is replaced
        with Raw(server.port) as conn:
            offer = ask(conn, "ns")
            answer, fd = show(offer.path, offer.ticket)
            os.close(fd)
            assert answer == b"+"
        assert server.stop() == 0
        assert not (tmp_path / "mine").exists()


def test_turned_off(tmp_path: Path) -> None:
    with start_server("--kvcache", "--lane", "off", dir=tmp_path) as server, Raw(server.port) as conn:
        fill(conn, "ns")
        assert "--lane off" in str(conn.call("KV.PREFIX.LANE", "ns"))
        assert not (tmp_path / "pion.lane").exists()


def test_a_long_temporary_directory_is_no_reason_to_have_none(tmp_path: Path) -> None:
    deep = tmp_path / ("t" * 110)
    deep.mkdir()
    for where in ({}, {"dir": tmp_path / ("d" * 110)}):
        with start_server("--kvcache", env={"TMPDIR": str(deep)}, **where) as server, Raw(server.port) as conn:
            fill(conn, "ns")
            offer = ask(conn, "ns")
            os.close(show(offer.path, offer.ticket)[1])
            folder = os.path.dirname(offer.path)
            assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700
        assert not os.path.exists(folder)


def test_why_there_is_none_is_said(tmp_path: Path) -> None:
    (tmp_path / "pion.lane").write_text("mine")
    with start_server("--kvcache", dir=tmp_path) as server, Raw(server.port) as conn:
        fill(conn, "ns")
        why = f"{tmp_path}/pion.lane exists and is not a socket"
        assert f"this server hands out no files ({why}; as with --lane off)" in str(conn.call("KV.PREFIX.LANE", "ns"))
        assert f"no lane for clients of this machine, they are sent the bytes: {why}" in server.output


def test_no_place_for_the_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lane.tempfile, "tempdir", str(tmp_path / ("t" * 110)))
    monkeypatch.setattr(lane, "_SHORT", ("/no/such/none",))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    with pytest.raises(StartupError, match=r"too long for the path of a socket; .*none: No such file.*--lane PATH"):
        lane.Lane("", None, lambda _: -1)
