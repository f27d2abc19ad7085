"""The plane without descriptors: what is received in parts, bounds of memory, files in and out."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from pion._core import stream
from pion._core.keyspace import Keyspace
from pion._core.plane import Plane
from tests.support.plane import Commands, ask, frame, memory_plane, open_conn


@pytest.fixture
def rig(tmp_path: Path):
    with memory_plane(tmp_path) as (plane, commands):
        yield plane, commands


def test_a1_the_same_protocol_error_for_every_split(rig):
    plane, _ = rig
    for bad, expect in [
        (b"*2\r\n$3\r\nGET\r\n$-7\r\n", b"invalid bulk length"),
        (b"*1\r\n#3\r\nabc\r\n", b"expected '$', got '#'"),
        (b"*" + b"1" * 70_000, b"too big mbulk count string"),
        (b"*99999999999\r\n", b"invalid multibulk length"),
        (b"*1\r\n$4\r\nPINGxx", b"invalid bulk length"),
        (b"GET 'a\r\n", b"unbalanced quotes in request"),
        (b"x" * 70_000, b"too big inline request"),
    ]:
        for step in (len(bad), 1, 7, 4096):
            if step == 1 and len(bad) > 1000:
                continue
            conn = open_conn(plane)
            plane.feed(conn, frame("PING"))
            for at in range(0, len(bad), step):
                plane.feed(conn, bad[at : at + step])
            assert plane.take_output(conn) == b"+PONG\r\n-ERR Protocol error: " + expect + b"\r\n", (bad[:40], step)
            assert conn.closed
    assert plane.stats["input_bytes"] == 0


def test_a3_before_the_login_commands_are_small(rig):
    plane, _ = rig
    for bad, expect in [
        (b"*1000000\r\n$500000000\r\n", b"unauthenticated multibulk length"),
        (b"*2\r\n$4\r\nAUTH\r\n$500000000\r\n", b"unauthenticated bulk length"),
    ]:
        conn = plane.open_memory()
        plane.feed(conn, bad)
        assert plane.take_output(conn) == b"-ERR Protocol error: " + expect + b"\r\n"
        assert conn.closed


def test_the_login_changes_the_limits_of_the_next_command(rig):
    plane, _ = rig
    conn = plane.open_memory()
    plane.feed(conn, frame("AUTH") + frame("ARGS", *range(20)))
    assert plane.take_output(conn).startswith(b"+OK\r\n*21\r\n")
    conn.authenticated = False
    plane.feed(conn, frame("ARGS", *range(20)))
    assert plane.take_output(conn) == b"-ERR Protocol error: unauthenticated multibulk length\r\n"


def test_a3_memory_follows_the_bytes_received(rig):
    plane, _ = rig
    conn = open_conn(plane)
    plane.feed(conn, b"*1048576\r\n$4\r\nARGS\r\n$400000000\r\n" + b"x" * 1000)
    assert conn.input_bytes < 64 << 10
    plane.feed(conn, b"x" * 1_000_000)
    assert conn.input_bytes < 3_000_000
    assert plane.stats["input_bytes"] == conn.input_bytes
    plane.close(conn, after_flush=False)
    assert plane.stats["input_bytes"] == 0


def test_a3_the_budget_over_all_half_received_commands(tmp_path):
    with memory_plane(tmp_path, limits={"query_buffer_total": 1 << 20, "query_buffer": 800_000}) as (plane, _):
        conns = [open_conn(plane) for _ in range(8)]
        for conn in conns:
            plane.feed(conn, b"*2\r\n$4\r\nARGS\r\n$700000\r\n" + b"x" * 200_000)
        alive = [conn for conn in conns if not conn.closing]
        assert 1 <= len(alive) < 8
        assert plane.stats["input_bytes"] <= 1 << 20
        refused = next(conn for conn in conns if conn.closing)
        assert plane.take_output(refused).startswith(b"-ERR Protocol error: ")
        for conn in conns:
            if conn is not alive[0]:
                plane.close(conn, after_flush=False)
        plane.feed(alive[0], b"x" * 500_000 + b"\r\n")
        assert plane.take_output(alive[0]).startswith(b"*2\r\n$4\r\nARGS\r\n$700000\r\n")


def test_one_command_may_not_exceed_its_budget(tmp_path):
    with memory_plane(tmp_path, limits={"query_buffer": 100_000}) as (plane, _):
        conn = open_conn(plane)
        plane.feed(conn, frame("ARGS", "x" * 60_000, "y" * 60_000))
        assert plane.take_output(conn).startswith(b"-ERR Protocol error: ")


@pytest.mark.parametrize("size", [32 << 10, 100_000, 5_000_000])
@pytest.mark.parametrize("step", [997, 1 << 20, 1 << 30])
def test_large_values_are_received_and_sent_whole(rig, size, step):
    plane, commands = rig
    if size > 1_000_000 and step < 1000:
        step *= 100
    conn = open_conn(plane)
    value = random.Random(size).randbytes(size)
    data = frame("PING") + frame("SET", "big", value) + frame("GET", "big") + frame("PING")
    for at in range(0, len(data), step):
        plane.feed(conn, data[at : at + step])
    assert plane.take_output(conn) == b"+PONG\r\n+OK\r\n$%d\r\n%s\r\n+PONG\r\n" % (size, value)
    assert commands.calls == []
    assert plane.stats["input_bytes"] == 0


def test_a_large_value_for_a_slow_command_is_received_in_memory(rig):
    plane, commands = rig
    conn = open_conn(plane)
    value = os.urandom(300_000)
    assert ask(plane, conn, "ARGS", value) == b"*2\r\n$4\r\nARGS\r\n$300000\r\n%s\r\n" % value
    conn.fast = True
    plane.feed(conn, frame("SET", "k", value)[:-100])
    plane.fast_enabled = False  # while the value is on its way
    plane.feed(conn, frame("SET", "k", value)[-100:])
    assert plane.take_output(conn) == b"-ERR slow SET\r\n"
    assert commands.calls[-1] == [b"SET", b"k", value]


def test_output_bounds_stop_the_parser_until_output_is_taken(tmp_path):
    with memory_plane(tmp_path, limits={"max_output": 100_000, "max_output_slots": 20}) as (plane, _):
        conn = open_conn(plane)
        ask(plane, conn, "SET", "v", "x" * 20_000)
        plane.feed(conn, frame("GET", "v") * 50)
        assert not conn.wants_input
        assert 100_000 <= conn.output_bytes < 150_000
        total, rounds = b"", 0
        while out := plane.take_output(conn):
            total += out
            rounds += 1
        assert total == (b"$20000\r\n" + b"x" * 20_000 + b"\r\n") * 50
        assert rounds > 5
        assert conn.wants_input


def test_files_come_out_in_order_with_their_neighbours(rig):
    plane, commands = rig
    content = commands.content(3_000_000)
    conn = open_conn(plane)
    plane.feed(conn, frame("FILE", 5, 100) + frame("PING") + frame("FILE", 0, 3_000_000) + frame("ZEROS", 100_000))
    out = plane.take_output(conn)
    assert out == (
        b"$100\r\n" + content[5:105] + b"\r\n+PONG\r\n$3000000\r\n" + content + b"\r\n"
        b"*3\r\n$1\r\nx\r\n$100000\r\n" + bytes(100_000) + b"\r\n:7\r\n"
    )
    assert ask(plane, conn, "FILE", 0, 0) == b"$0\r\n\r\n"


def test_a_truncated_file_ends_the_connection(rig):
    plane, commands = rig
    commands.content(300_000)
    conn = open_conn(plane)
    plane.feed(conn, frame("FILE", 0, 400_000))
    with pytest.raises(EOFError):
        plane.take_output(conn)
    assert conn.closed


@pytest.mark.parametrize("step", [1000, 70_001, 1 << 30])
def test_streamed_arguments_go_to_their_file(rig, step, tmp_path):
    plane, commands = rig
    conn = open_conn(plane)
    body = os.urandom(400_000)
    data = frame("STORE", body, "name") + frame("PING")
    for at in range(0, len(data), step):
        plane.feed(conn, data[at : at + step])
    crc = commands.calls[1][1].crc
    assert plane.take_output(conn) == b"*4\r\n:400000\r\n:400000\r\n:%d\r\n:0\r\n+PONG\r\n" % crc
    assert commands.calls[0] == [b"open", b"STORE", 400_000]
    assert commands.calls[1][2] == b"name"
    assert (tmp_path / f"stored{conn.id}").read_bytes() == body
    assert commands.aborted == []


def test_streams_small_refused_or_in_memory(rig):
    plane, commands = rig
    conn = open_conn(plane)
    assert ask(plane, conn, "STORE", "small") == b"$5\r\nsmall\r\n"
    body = os.urandom(300_000)
    conn.data["memory"] = True
    assert ask(plane, conn, "STORE", body) == b"$300000\r\n%s\r\n" % body
    conn.data.clear()
    conn.data["refuse"] = True
    assert ask(plane, conn, "STORE", body) == b"*4\r\n:300000\r\n:0\r\n:0\r\n:0\r\n"
    assert [call[0] for call in commands.calls].count(b"open") == 2


def test_an_opener_that_fails_or_lies_falls_back_to_memory(tmp_path, caplog):
    answers = [ValueError("cannot"), stream.Sink(None, 0, 5), "nonsense"]

    def opener(conn, argv, nbytes):
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    commands = Commands(tmp_path, Keyspace())
    plane = Plane(commands.keyspace, commands, opener, streams=[(b"STORE", 1)])
    conn = open_conn(plane)
    for _ in range(3):
        assert ask(plane, conn, "STORE", b"y" * 300_000) == b"$300000\r\n" + b"y" * 300_000 + b"\r\n"
    assert caplog.text.count("opening a stream failed") == 3
    plane.close()


def test_a_stream_cut_short_is_aborted(rig):
    plane, commands = rig
    conn = open_conn(plane)
    plane.feed(conn, frame("STORE", b"z" * 400_000)[:300_000])
    plane.close(conn, after_flush=False)
    assert len(commands.aborted) == 1
    assert not commands.aborted[0].done


def test_a_frame_that_breaks_behind_its_stream_is_aborted(rig):
    plane, commands = rig
    conn = open_conn(plane)
    plane.feed(conn, b"*2\r\n$5\r\nSTORE\r\n$400000\r\n" + b"z" * 400_000 + b"XX")
    assert plane.take_output(conn) == b"-ERR Protocol error: invalid bulk length\r\n"
    assert conn.closed
    assert len(commands.aborted) == 1
