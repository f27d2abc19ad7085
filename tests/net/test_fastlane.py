"""The binary lane of a server process: bytes, answers, statuses, cold layers."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from pion import limits, testing
from pion.attention import choice
from tests.support import attend, models
from tests.support.attention import normal
from tests.support.binary import (
    COLDMISS,
    ERROR,
    FUSED,
    MISS,
    NOTHING,
    OK,
    PING,
    Binary,
    ask_ping,
    figures,
    frame,
    fused_body,
    lane,
    one_key,
)
from tests.support.raw import Raw


@pytest.fixture(scope="module")
def server() -> Iterator[testing.Server]:
    with testing.server("--kvcache") as running:
        yield running


# --- bytes and answers -----------------------------------------------------------------------------------------------


def test_bytes_typed_by_hand(server: testing.Server) -> None:
    """Of one key the answer is its value, whatever is asked. H_q 2, M 1, D 8."""
    with Raw(server.port) as conn:
        value = bytes.fromhex("0000803f 00000040 00004040 00008040 0000a040 0000c040 0000e040 00000041")  # 1 to 8
        conn.ok("ATTEND.PREFIX.STORE", "hand", 3, 1, 1, 8, b"\0" * 32, value)
    query = "5eca 24 58000000  0400 68616e64  0300 0200 0800 0100 01000000 00000000" + " 0000003f" * 16 + "0000"
    for sent, want in (
        ("5eca ff 00000000", "5eca 00 00000000"),
        ("5eca ff 02000000 6869", "5eca 00 00000000"),  # PING takes any body
        ("5eca 37 02000000 7077", "5eca 01 00000000"),  # AUTH without a password: unknown
        ("5eca 20 00000000", "5eca 01 00000000"),  # ATTEND_CREATE, of another plane: unknown
        ("5eca 24 00000000", "5eca 01 00000000"),
        (query.replace("68616e64", "68616e65"), "5eca 02 00000000"),  # no such session
        (query, "5eca 00 40000000" + value.hex() * 2),
    ):
        with Binary(lane(server)) as conn2:
            conn2.send(bytes.fromhex(sent))
            assert conn2._exactly(len(bytes.fromhex(want))) == bytes.fromhex(want), sent


SHAPES = [
    # H_q, H_kv, N, M, S, D, window
    (1, 1, 1, 1, 0, 8, None),
    (2, 2, 5, 1, 1, 64, -1),
    (6, 2, 100, 3, 3, 64, None),
    (8, 8, 257, 1, 9, 128, 0),
    (9, 3, 40, 7, 2, 80, 33),  # M > S
    (4, 1, 1000, 2, 40, 32, 100),
    (8, 4, 31, 16, 16, 16, 1),
    (16, 2, 600, 4, 4, 256, 5000),
    (2, 1, 33, 5, 0, 512, 7),
    (3, 1, 2048, 1, 1, 96, -1),
]


@pytest.mark.parametrize(
    "flags",
    [["--attention", "cpu"], ["--attention", "cpu", "--metal-attention-fp16"], ["--attention", "mlx"],
     ["--fa-window", "20"], ["--attend-autowarm"]],
    ids=" ".join,
)  # fmt: skip
def test_the_same_bits_as_over_resp(flags: list[str]) -> None:
    """Every shape, as the engine computes it in the plane's thread or beside it, from aligned bytes or others."""
    if "mlx" in flags:
        models.need_mlx()
        assert choice.has_mlx()
    with testing.server("--kvcache", *flags) as server, Raw(server.port, timeout=60) as conn:
        with Binary(lane(server), timeout=60) as binary:
            for number, (heads, kv_heads, count, rows, suffix, dim, window) in enumerate(SHAPES):
                sid = "sid"[: number % 3 + 1] + "x" * (number % 4)
                k, v = normal(1, kv_heads, count, dim), normal(2, kv_heads, count, dim)
                assert attend.store(conn, sid, number, k, v) == "OK"
                q, k_suf, v_suf = (normal(seed, h, n, dim) for seed, h, n in
                                   ((3, heads, rows), (4, kv_heads, suffix), (5, kv_heads, suffix)))  # fmt: skip
                for heads_of in (np.arange(heads) // (heads // kv_heads), np.arange(heads)[::-1] % kv_heads):
                    heads_map = heads_of.astype(np.uint8)
                    more = [] if window is None else [window]
                    want = attend.fused(conn, sid, number, q, k_suf, v_suf, heads_map, *more)
                    got = binary.fused(sid, number, q, k_suf, v_suf, heads_map, window)
                    assert np.isfinite(want).all()
                    assert got.tobytes() == want.tobytes(), SHAPES[number]
        told = figures(conn)
        assert (told["queries"], told["errors"], told["misses"]) == (2 * len(SHAPES), 0, 0)
        calls = conn.fields("INFO", "commandstats")["cmdstat_attend.prefix.query_fused"]
        assert calls.startswith(f"calls={4 * len(SHAPES)},"), "both ways are one command"


def test_a_suffix_of_many_megabytes(server: testing.Server) -> None:
    with Raw(server.port, timeout=60) as conn, Binary(lane(server), timeout=60) as binary:
        attend.store(conn, "large", 0, normal(1, 2, 10, 64), normal(2, 2, 10, 64))
        q, k, v = normal(3, 2, 1, 64), normal(4, 2, 12_000, 64), normal(5, 2, 12_000, 64)
        want = attend.fused(conn, "large", 0, q, k, v, [0, 1])
        body = fused_body("large", 0, q, k, v, [0, 1])
        binary.send(frame(FUSED, body) + frame(PING) + frame(FUSED, body))
        assert binary.read() == (OK, want.tobytes())
        assert binary.read() == (OK, b"")
        assert binary.read() == (OK, want.tobytes())


def test_pipelined_requests_are_answered_in_order(server: testing.Server) -> None:
    with Raw(server.port) as conn:
        for number in range(4):
            one_key(conn, f"p{number}", number)
    q = normal(3, 1, 1, 8)
    sent, want = [], []
    for number in range(200):
        kind = number % 5
        if kind == 4:
            sent.append(frame(PING if number % 2 else 0x10, b"x" * (number % 3)))
            want.append((OK if number % 2 else MISS, b""))
        else:
            sent.append(frame(FUSED, fused_body(f"p{kind}", 0, q, NOTHING, NOTHING, [0])))
            want.append((OK, np.full(8, kind, "<f4").tobytes()))
    with Binary(lane(server)) as binary:
        binary.send(b"".join(sent))
        assert [binary.read() for _ in want] == want
        binary.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in b"".join(sent[:8]):
            binary.send(bytes([byte]))
        assert [binary.read() for _ in want[:8]] == want[:8]
        binary.send(b"".join(sent))
        binary.sock.shutdown(socket.SHUT_WR)  # half closed: what was asked is still answered
        assert [binary.read() for _ in want] == want
        assert binary.ended()


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({}, OK),
        ({"layer": 1}, ERROR),
        ({"sid": "nobody"}, ERROR),
        ({"sid": ""}, ERROR),
        ({"q": normal(1, 2, 1, 16), "head_map": [0, 0]}, ERROR),  # D of 16 for a layer of 8
        ({"head_map": [1]}, ERROR),  # there is one head of K/V
        ({"q": normal(1, 3, 1, 8), "head_map": [0, 0, 0], "k": normal(2, 2, 0, 8), "v": normal(2, 2, 0, 8)}, MISS),
        ({"q": np.zeros((0, 1, 8), np.float32), "head_map": []}, MISS),
        ({"q": np.zeros((1, 0, 8), np.float32)}, MISS),
        ({"q": np.zeros((1, 1, 0), np.float32), "k": np.zeros((1, 0, 0), np.float32)}, MISS),
    ],
)
def test_statuses(server: testing.Server, change: dict[str, Any], status: int) -> None:
    given: dict[str, Any] = {"sid": "st", "layer": 0, "q": normal(3, 1, 1, 8), "k": NOTHING, "v": NOTHING}
    given |= {"head_map": [0]} | change
    with Raw(server.port) as conn:
        one_key(conn, "st")
    with Binary(lane(server)) as binary:
        got, body = binary.call(FUSED, fused_body(**given))
        assert got == status
        assert (body != b"") == (status == OK)
        assert binary.call(PING) == (OK, b""), "the connection lives on"


def test_an_answer_that_has_no_room(server: testing.Server) -> None:
    """Header and body are 4 MiB at most."""
    rows = (limits.FASTLANE_REPLY - 7) // 32
    with Raw(server.port) as conn, Binary(lane(server)) as binary:
        one_key(conn, "big", 2.0)
        got = binary.fused("big", 0, np.ones((1, rows, 8), np.float32), NOTHING, NOTHING, [0])
        assert (got == 2.0).all()
        assert binary.fused("big", 0, np.ones((1, rows + 1, 8), np.float32), NOTHING, NOTHING, [0]) == ERROR


def test_an_engine_that_is_off() -> None:
    with testing.server("--kvcache", "--attention", "off") as server, Binary(lane(server)) as binary:
        body = fused_body("s", 0, normal(3, 1, 1, 8), NOTHING, NOTHING, [0])
        assert binary.call(FUSED, body) == (ERROR, b"")
        assert binary.call(FUSED, body[:-1]) == (MISS, b"")
        assert binary.call(PING) == (OK, b"")


# --- cold layers -----------------------------------------------------------------------------------------------------


def test_cold_then_warmed_then_dropped() -> None:
    q = normal(3, 2, 1, 64)
    none = np.zeros((2, 0, 64), np.float32)
    flags = "--kvcache", "--attend-warm-slots", "2"
    with testing.server(*flags) as server, Raw(server.port) as conn, Binary(lane(server)) as binary:
        k, v = attend.prefix(conn, "ns", 1, 50, 2, 64)[0]
        assert conn.ok("KV.PREFIX.WARM", "ns", 2, 64, "ns_attn") == "1"
        want = binary.fused("ns_attn", 0, q, none, none, [0, 1])
        for layer in (1, 2):
            attend.store(conn, "other", layer, k, v)
        body = fused_body("ns_attn", 0, q, none, none, [0, 1])
        assert binary.call(FUSED, body) == (COLDMISS, b"")
        many = fused_body("ns_attn", 0, np.ones((2, 9000, 64), np.float32), none, none, [0, 1])
        assert binary.call(FUSED, many) == (COLDMISS, b""), "cold, before it is too much"
        assert conn.ok("KV.PREFIX.WARM", "ns", 2, 64, "ns_attn") == "1"
        assert np.array_equal(binary.fused("ns_attn", 0, q, none, none, [0, 1]), want)
        assert conn.ok("ATTEND.PREFIX.DROP", "ns_attn") == 1
        assert binary.call(FUSED, body) == (ERROR, b"")
        told = figures(conn)
    assert (told["queries"], told["coldmisses"], told["errors"]) == (2, 2, 1)


def test_autowarm() -> None:
    q = normal(3, 2, 1, 64)
    none = np.zeros((2, 0, 64), np.float32)
    flags = "--kvcache", "--attend-warm-slots", "2", "--attend-autowarm"
    with testing.server(*flags) as server, Raw(server.port) as conn, Binary(lane(server)) as binary:
        k, v = attend.prefix(conn, "ns", 1, 50, 2, 64)[0]
        conn.ok("KV.PREFIX.WARM", "ns", 2, 64, "ns_attn")
        want = binary.fused("ns_attn", 0, q, none, none, [0, 1])
        for layer in (1, 2):
            attend.store(conn, "other", layer, k, v)
        assert conn.call("ATTEND.PREFIX.LOOKUP", "ns_attn", 0) == "COLD"
        assert np.array_equal(binary.fused("ns_attn", 0, q, none, none, [0, 1]), want)
        assert conn.call("ATTEND.PREFIX.LOOKUP", "ns_attn", 0) == "HIT"


# --- where it listens ------------------------------------------------------------------------------------------------


def test_beside_the_port_of_resp(server: testing.Server) -> None:
    with Raw(server.port) as conn:
        told = int(conn.fields("INFO", "server")["binary_port"])
        assert told == int(conn.fields("INFO", "attention")["binary_port"])
        assert conn.ok("CONFIG", "GET", "binary-port") == [b"binary-port", str(told).encode()]
        assert conn.ok("CONFIG", "SET", "binary-port", told) == "OK"
    assert f"Ready to accept binary requests on 127.0.0.1:{told}\n" in server.output


@pytest.mark.parametrize("flags", [[], ["--metal-attention"], ["--kvcache", "--binary-port", "off"]])
def test_without_a_lane(flags: list[str]) -> None:
    with testing.server(*flags) as server, Raw(server.port) as conn:
        assert conn.fields("INFO", "server")["binary_port"] == "0"
        assert conn.ok("CONFIG", "GET", "binary-port") == [b"binary-port", b"off"]
        assert "binary" not in server.output


def taken() -> tuple[socket.socket, int]:
    """A listening socket whose port has a free one below."""
    while True:
        sock = socket.create_server(("127.0.0.1", 0))
        port = sock.getsockname()[1]
        with socket.socket() as below:
            try:
                below.bind(("127.0.0.1", port - 1))
                return sock, port
            except OSError:
                sock.close()


def test_a_taken_port_is_a_warning_unless_it_was_asked_for() -> None:
    sock, port = taken()
    with sock:
        with testing.server("--kvcache", port=port - 1) as server, Raw(server.port) as conn:
            assert conn.fields("INFO", "server")["binary_port"] == "0"
            text = f"no binary lane, attention queries go over RESP: cannot bind port {port} (already in use?); "
            assert f"{text}--binary-port N puts it elsewhere" in server.output
        with pytest.raises(RuntimeError, match=rf"FATAL: --binary-port: cannot bind port {port} \(already in use\?\)"):
            testing.Server(["--port", "0", "--memory-only", "--kvcache", "--binary-port", str(port)])
        with testing.server("--kvcache", "--binary-port", "0", port=port - 1) as server:
            assert lane(server) not in (0, port)
            assert ask_ping(server)


def test_the_highest_port_has_none_beside_it() -> None:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", 65_535))
        except OSError:
            pytest.skip("port 65535 is taken")
    with testing.server("--kvcache", port=65_535) as server, Raw(server.port) as conn:
        assert conn.fields("INFO", "server")["binary_port"] == "0"
        assert "there is no port above 65535" in server.output
