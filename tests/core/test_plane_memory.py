"""The plane without descriptors: parsing, the two doors, order, bounds, ends."""

from __future__ import annotations

import errno
import gc
import os
from pathlib import Path

import pytest

from pion._core import plane as core
from pion._core.keyspace import Keyspace
from pion._core.plane import PENDING, Plane
from pion._core.resp import OK, Push
from tests.support.plane import FAST, Commands, ask, frame, memory_plane, open_conn


@pytest.fixture
def rig(tmp_path: Path):
    with memory_plane(tmp_path) as (plane, commands):
        yield plane, commands


def test_fast_commands_answer_as_redis_does(rig):
    plane, commands = rig
    conn = open_conn(plane)
    for request, reply in [
        (("PING",), b"+PONG\r\n"),
        (("ping", "hi"), b"$2\r\nhi\r\n"),
        (("ECHO", ""), b"$0\r\n\r\n"),
        (("GET", "a"), b"$-1\r\n"),
        (("SET", "a", "1"), b"+OK\r\n"),
        (("GET", "a"), b"$1\r\n1\r\n"),
        (("INCR", "a"), b":2\r\n"),
        (("INCR", "new"), b":1\r\n"),
        (("EXISTS", "a", "a", "b"), b":2\r\n"),
        (("MGET", "a", "b"), b"*2\r\n$1\r\n2\r\n$-1\r\n"),
        (("DEL", "a", "b", "new"), b":2\r\n"),
        (("SET", "", ""), b"+OK\r\n"),
        (("GET", ""), b"$0\r\n\r\n"),
    ]:
        assert ask(plane, conn, *request) == reply, request
    assert commands.calls == []
    conn.proto = 3
    assert ask(plane, conn, "GET", "none") == b"_\r\n"
    assert ask(plane, conn, "MGET", "none") == b"*1\r\n_\r\n"
    assert plane.stats["fast_calls"][b"get"] == 4
    assert plane.stats["commands_processed"] == 15
    assert conn.cmd_count == 15
    assert conn.last_cmd == b"mget"


@pytest.mark.parametrize(
    "request_",
    [("GET",), ("GET", "a", "b"), ("SET", "a"), ("SET", "a", "b", "EX", "1"), ("PING", "a", "b"), ("INCR", "text")],
)
def test_everything_a_fast_command_does_not_decide_goes_to_python(rig, request_):
    plane, commands = rig
    conn = open_conn(plane)
    ask(plane, conn, "SET", "text", "abc")
    assert ask(plane, conn, *request_) == b"-ERR slow %s\r\n" % request_[0].encode()
    assert len(commands.calls) == 1


def test_values_of_another_type_go_to_python(rig):
    plane, commands = rig
    conn = open_conn(plane)
    commands.keyspace.set_object(0, b"h", {b"f": b"v"}, b"hash")
    assert ask(plane, conn, "GET", "h") == b"-ERR slow GET\r\n"
    assert ask(plane, conn, "INCR", "h") == b"-ERR slow INCR\r\n"
    assert ask(plane, conn, "MGET", "h") == b"*1\r\n$-1\r\n"
    assert ask(plane, conn, "EXISTS", "h") == b":1\r\n"


def test_an_object_is_replaced_and_deleted_without_python(rig):
    plane, commands = rig
    conn = open_conn(plane)

    class Value(dict):
        pass

    values = [Value(), Value()]
    commands.keyspace.set_object(0, b"h", values[0], b"hash")
    commands.keyspace.set_object(0, b"g", values[1], b"hash")
    before = [gc.get_referrers(value) for value in values]
    assert ask(plane, conn, "SET", "h", "now text") == b"+OK\r\n"
    assert ask(plane, conn, "DEL", "g") == b":1\r\n"
    assert ask(plane, conn, "GET", "h") == b"$8\r\nnow text\r\n"
    del before
    import weakref

    refs = [weakref.ref(value) for value in values]
    values.clear()
    gc.collect()
    assert [ref() for ref in refs] == [None, None]


@pytest.mark.parametrize("flag", ["fast", "fast_enabled", "oom"])
def test_the_fast_path_rule(rig, flag):
    plane, commands = rig
    conn = open_conn(plane)
    if flag == "fast":
        conn.fast = False
    elif flag == "fast_enabled":
        plane.fast_enabled = False
    else:
        commands.keyspace.set(0, b"k", b"v")
        commands.keyspace.bound(1)
    assert ask(plane, conn, "SET", "a", "1") == b"-ERR slow SET\r\n"
    assert ask(plane, conn, "PING") == (b"+PONG\r\n" if flag == "oom" else b"-ERR slow PING\r\n")
    assert ask(plane, conn, "SET", "a", "x" * 100_000) == b"-ERR slow SET\r\n"


def test_before_the_login_nothing_is_fast(rig):
    plane, _ = rig
    conn = plane.open_memory()
    assert ask(plane, conn, "PING") == b"-ERR slow PING\r\n"


def test_pipelined_commands_answer_in_order(rig):
    plane, _ = rig
    conn = open_conn(plane)
    plane.feed(conn, frame("SET", "k", "1") + frame("ARGS", "x") + frame("GET", "k") + b"PING\r\n\r\n*0\r\nGET k\r\n")
    assert plane.take_output(conn) == b"+OK\r\n*2\r\n$4\r\nARGS\r\n$1\r\nx\r\n$1\r\n1\r\n+PONG\r\n$1\r\n1\r\n"


def test_the_python_door_is_the_same_function(rig):
    plane, _ = rig
    conn = open_conn(plane)
    for request in [
        ("SET", "a", "1"),
        ("INCR", "a"),
        ("GET", "a"),
        ("GET", "b"),
        ("MGET", *"abcdefghij"),
        ("DEL", "a"),
    ]:
        other = open_conn(plane)
        argv = [part.encode() for part in request]
        for proto in (2, 3):
            conn.proto = other.proto = proto
            ask(plane, conn, "SET", "a", "1")
            direct = ask(plane, conn, *request)
            ask(plane, conn, "SET", "a", "1")
            assert plane.exec_fast(other, getattr(core, f"FAST_{request[0]}"), argv) == direct
    assert plane.exec_fast(conn, core.FAST_SET, [b"SET", b"a", b"1", b"NX"]) is None
    assert plane.exec_fast(conn, core.FAST_ECHO, [b"ECHO", object()]) is None
    assert plane.exec_fast(conn, 999, [b"X"]) is None


def test_a_reply_that_comes_later_stops_only_its_connection(rig):
    plane, commands = rig
    conn, other = open_conn(plane), open_conn(plane)
    plane.feed(conn, frame("PING") + frame("LATER") + frame("PING") + frame("LATER") + frame("GET", "a"))
    assert plane.take_output(conn) == b"+PONG\r\n"
    assert conn.pending
    assert not conn.wants_input
    assert ask(plane, other, "SET", "a", "1") == b"+OK\r\n"
    plane.push(conn, Push(["out", "of", "band"]))
    plane.resume(conn, [1, None])
    assert plane.take_output(conn) == b"*3\r\n$3\r\nout\r\n$2\r\nof\r\n$4\r\nband\r\n*2\r\n:1\r\n$-1\r\n+PONG\r\n"
    plane.resume(conn, OK)
    assert plane.take_output(conn) == b"+OK\r\n$1\r\n1\r\n"
    with pytest.raises(RuntimeError, match="no reply is due"):
        plane.resume(conn, OK)
    assert commands.later == [conn, conn]
    assert repr(PENDING) == "PENDING"


def test_a10_pushes_keep_their_own_frame_in_resp3(rig):
    plane, _ = rig
    conn = open_conn(plane)
    conn.proto = 3
    plane.push(conn, Push(["message", b"ch", b"x"]))
    plane.feed(conn, frame("PING"))
    assert plane.take_output(conn) == b">3\r\n$7\r\nmessage\r\n$2\r\nch\r\n$1\r\nx\r\n+PONG\r\n"


def test_a_failing_handler_answers_and_the_connection_lives_on(rig, caplog):
    plane, _ = rig
    conn = open_conn(plane)
    plane.feed(conn, frame("FAIL") + frame("WRONG") + frame("PING"))
    assert plane.take_output(conn) == b"-ERR internal error\r\n-ERR internal error\r\n+PONG\r\n"
    assert "on purpose" in caplog.text


def test_closing(rig):
    plane, commands = rig
    conn = open_conn(plane)
    plane.feed(conn, frame("QUIT") + frame("PING"))
    assert conn.closing
    assert not conn.closed
    assert plane.take_output(conn) == b"+OK\r\n"
    assert conn.closed
    assert commands.closed == [conn]
    assert plane.connections == []
    plane.feed(conn, frame("PING"))
    assert plane.take_output(conn) == b""
    plane.close(conn)
    plane.resume(conn, OK)
    plane.push(conn, OK)
    dropped = open_conn(plane)
    plane.feed(dropped, frame("PING") + frame("DROPME"))
    assert dropped.closed
    assert plane.take_output(dropped) == b""
    assert repr(dropped).startswith("<Conn")


def test_resume_after_the_end_does_nothing(rig):
    plane, _ = rig
    conn = open_conn(plane)
    plane.feed(conn, frame("LATER"))
    plane.close(conn, after_flush=False)
    plane.resume(conn, OK)
    assert conn.closed


def test_the_log_is_written_before_replies_and_its_failure_is_told(tmp_path):
    keyspace = Keyspace(seed=1)
    path = tmp_path / "log"
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    keyspace.attach_log(fd, 0, 1)
    with memory_plane(tmp_path, keyspace=keyspace) as (plane, _):
        conn = open_conn(plane)
        plane.feed(conn, frame("SET", "a", "1") + frame("PYSET", "b", "2"))
        size = path.stat().st_size
        assert size > 0
        assert plane.take_output(conn) == b"+OK\r\n+OK\r\n"
        ask(plane, conn, "GET", "a")
        assert path.stat().st_size == size
        keyspace.detach_log()
        broken = os.open(path, os.O_RDONLY)
        keyspace.attach_log(broken, size, 1)
        reader = open_conn(plane)
        plane.feed(reader, frame("GET", "a"))
        plane.feed(conn, frame("PING") + frame("SET", "a", "3") + frame("GET", "a") + frame("BIG", "20000"))
        refused = b"-MISCONF Errors writing to the log: " + os.strerror(errno.EBADF).encode() + b"\r\n"
        assert plane.take_output(conn) == b"+PONG\r\n" + 3 * refused
        assert not conn.closed
        assert ask(plane, conn, "PING") == b"+PONG\r\n"
        assert plane.take_output(reader) == b"$1\r\n1\r\n"
        assert ask(plane, reader, "SET", "a", "4") == b"-ERR slow SET\r\n"
        keyspace.detach_log()
        os.close(broken)
    os.close(fd)


def test_every_command_of_a_batch_that_cannot_be_logged_is_answered(tmp_path):
    """A client that pipelines counts replies: none too few, whether C, Python or somebody later gives them."""
    keyspace = Keyspace(seed=1)
    broken = os.open(tmp_path, os.O_RDONLY)
    refused = b"-MISCONF Errors writing to the log: " + os.strerror(errno.EBADF).encode() + b"\r\n"
    with memory_plane(tmp_path, keyspace=keyspace) as (plane, commands):
        conn = open_conn(plane)
        keyspace.attach_log(broken, 0, 1)
        plane.feed(conn, frame("PYSET", "b", "2") + frame("PING") + frame("BIG", "20000") + frame("LATER"))
        assert plane.take_output(conn) == 3 * refused
        plane.feed(conn, frame("PING"))
        plane.resume(conn, b"nothing written")
        assert plane.take_output(conn) == b"$15\r\nnothing written\r\n+PONG\r\n"
        assert not conn.closed
        assert commands.later == [conn]
        keyspace.detach_log()
    with memory_plane(tmp_path, keyspace=Keyspace(seed=1)) as (plane, commands):
        conn = open_conn(plane)
        commands.keyspace.attach_log(broken, 0, 1)
        plane.feed(conn, frame("LATER"))
        commands.keyspace.set(0, b"k", b"written while it was pending")
        plane.resume(conn, b"done")
        assert plane.take_output(conn) == refused
        assert ask(plane, conn, "PING") == b"+PONG\r\n"
        commands.keyspace.detach_log()
    os.close(broken)


def test_arguments_of_the_plane():
    keyspace = Keyspace()
    with pytest.raises(TypeError, match="unknown limit"):
        Plane(keyspace, print, limits={"nonsense": 1})
    with pytest.raises(ValueError, match="out of range"):
        Plane(keyspace, print, slice_bytes=1)
    with pytest.raises(ValueError, match="fast command"):
        Plane(keyspace, print, fast_table=[(77, b"X", 1, 0)])
    with pytest.raises(ValueError, match="streamed command"):
        Plane(keyspace, print, streams=[(b"X", 0)])
    plane = Plane(keyspace, print, fast_table=FAST)
    conn = plane.open_memory()
    for name, value in [("db", 999), ("proto", 4)]:
        with pytest.raises(ValueError):
            setattr(conn, name, value)
    plane.close()
    assert conn.closed
    with pytest.raises((TypeError, RuntimeError)):
        Plane(None, print)


def test_connection_attributes(rig):
    plane, _ = rig
    conn = plane.open_memory("them", "us")
    assert (conn.peer, conn.laddr, conn.fd, conn.db, conn.proto) == ("them", "us", -1, 0, 2)
    assert (conn.name, conn.lib_name, conn.lib_ver, conn.user, conn.data) == ("", "", "", None, {})
    assert conn.last_cmd == b""
    conn.authenticated = True
    conn.db = 3
    ask(plane, conn, "SET", "k", "v")
    assert conn.last_active >= conn.created > 0
    assert conn.net_in > 0
    assert conn.net_out == 5
    conn.db = 4
    assert ask(plane, conn, "GET", "k") == b"$-1\r\n"
    conn.last_cmd = b"client|list"
    assert conn.last_cmd == b"client|list"
    assert plane.stats["net_out"] == 10
    plane.reset_stats()
    assert plane.stats["commands_processed"] == 0


def test_a_plane_that_is_not_closed_is_freed(tmp_path):
    commands = Commands(tmp_path, Keyspace())
    plane = Plane(commands.keyspace, commands, None)
    conn = open_conn(plane)
    plane.feed(conn, frame("BIG", 100_000))
    del plane
    gc.collect()
    assert conn.closed


def test_a_connection_that_somebody_else_serves(rig):
    """It counts, is busy between `begin` and `finish`, and ends as others do."""
    plane, _ = rig
    ended: list[int] = []
    plane.on_close = lambda conn: ended.append(conn.id)
    before = dict(plane.stats)
    conn = open_conn(plane)
    active = conn.last_active
    assert plane.hold(conn, 1000, 1200)
    assert (conn.input_bytes, plane.stats["input_bytes"] - before["input_bytes"]) == (1000, 1000)
    plane.begin(conn, b"query")
    assert (conn.pending, conn.last_cmd, conn.cmd_count) == (True, b"query", 1)
    plane.close(conn)  # like CLIENT KILL: what is due still leaves
    assert (conn.closing, conn.closed, ended) == (True, False, [])
    plane.hold(conn, 0)
    plane.finish(conn, 300)
    assert (conn.closed, ended) == (True, [conn.id])
    assert conn.last_active >= active
    after = plane.stats
    assert [after[name] - before[name] for name in ("commands_processed", "net_in", "net_out", "input_bytes")] == [
        1, 1200, 300, 0,
    ]  # fmt: skip
    plane.finish(conn, 1)  # after the end nothing happens
    plane.hold(conn, 0)
    idle = open_conn(plane)
    plane.close(idle)
    assert ended == [conn.id, idle.id], "nothing is due: the end is now"
    plane.on_close = None


def test_what_is_held_for_all_connections_is_bounded(tmp_path: Path):
    with memory_plane(tmp_path, limits={"query_buffer_total": 100_000}) as (plane, _):
        one, other = open_conn(plane), open_conn(plane)
        assert plane.hold(one, 60_000, 60_000)
        assert not plane.hold(other, 60_000, 60_000)
        assert plane.hold(other, 0)
        plane.close(one, after_flush=False)
        plane.hold(one, 0)
        assert plane.hold(other, 100_000)
        plane.hold(other, 0)
