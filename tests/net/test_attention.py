"""The attention engine of a server process: flags, what is loaded when, its end."""

from __future__ import annotations

import socket
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pion import testing
from pion.attention import choice
from pion.ref import attention as ref
from tests.support import attend
from tests.support.attention import cosine, normal
from tests.support.raw import Raw, frame

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def loaded(server: testing.Server) -> set[str]:
    """Which of numpy and mlx the process has mapped."""
    maps = Path(f"/proc/{server.pid}/maps").read_text()
    return {name for name, file in (("numpy", "_multiarray_umath"), ("mlx", "/mlx/")) if file in maps}


def descriptors(server: testing.Server) -> str:
    lines = Path(f"/proc/{server.pid}/limits").read_text().splitlines()
    return next(line for line in lines if line.startswith("Max open files"))


def ask(conn: Raw) -> None:
    k, q = normal(1, 2, 30, 64), normal(3, 2, 1, 64)
    assert attend.store(conn, "s", 0, k, k) == "OK"
    out = attend.query(conn, "s", 0, q)
    assert cosine(out, ref.attend(q.astype(np.float64), k, k)[0]) >= 0.9999


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--kvcache", "-w", "1"], ""),
        (["--kvcache", "--metal-attention", "-w", "1"], " (the portable backend: there is no Metal here)"),
        (["--metal-attention", "-w", "1"], " (the portable backend: there is no Metal here)"),
        (["--attention", "cpu"], ""),
    ],
)
@linux
def test_start_lines(flags: list[str], words: str) -> None:
    """Those of the seeds give ATTEND.*, and say what computes it. Nothing is loaded before the first command."""
    with testing.server(*flags) as server, Raw(server.port) as conn:
        assert loaded(server) == set()
        limit = descriptors(server)
        assert f"attention  numpy{words}\n" in server.output
        assert conn.fields("INFO", "attention")["sdpa_backend"] == "none yet"
        assert conn.call("ATTEND.PREFIX.LOOKUP", "s", 0) == "MISS"
        assert loaded(server) == set()
        ask(conn)
        assert loaded(server) == {"numpy"}
        assert descriptors(server) == limit
        figures = conn.fields("INFO", "attention")
        assert (figures["sdpa_backend"], figures["sdpa_device"], figures["sdpa_queries"]) == ("cpu", "numpy", "1")
        told = conn.fields("ATTEND.PREFIX.INFO")
        assert told["attention_half"] == "0"
        for name in ("attend-max-bytes", "attention"):  # what a default decided
            field = {"attend-max-bytes": "sdpa_max_bytes"}.get(name, name)
            assert conn.ok("CONFIG", "GET", name) == [name.encode(), told[field].encode()]
            assert conn.ok("CONFIG", "SET", name, told[field]) == "OK"


def test_without_a_flag_there_is_none() -> None:
    with testing.server() as server, Raw(server.port) as conn:
        assert conn.ok("CONFIG", "GET", "attention") == [b"attention", b"off"]
        assert "attention  off (--kvcache)\n" in server.output
        assert str(conn.call("ATTEND.PREFIX.LOOKUP", "s", 0)).startswith("ERR Metal attention not available")


@linux
@pytest.mark.skipif(not choice.has_mlx(), reason="no mlx")
def test_mlx_is_loaded_by_the_first_store() -> None:
    with testing.server("--attention", "mlx") as server, Raw(server.port, timeout=60) as conn:
        assert "attention  MLX operations\n" in server.output
        limit = descriptors(server)
        assert loaded(server) == set()
        ask(conn)
        assert loaded(server) == {"numpy", "mlx"}
        assert descriptors(server) == limit  # mlx_lm would have lowered it
        assert conn.fields("INFO", "attention")["sdpa_backend"] == "mlx"


def test_half_precision() -> None:
    with testing.server("--metal-attention-fp16", "--fa-window", "20") as server, Raw(server.port) as conn:
        assert "K/V in half precision, the last 20 positions of a prefix\n" in server.output
        k, v, q = normal(1, 2, 30, 64), normal(2, 2, 30, 64), normal(3, 2, 1, 64)
        assert attend.store(conn, "s", 0, k, v) == "OK"
        assert conn.fields("ATTEND.PREFIX.INFO")["sdpa_warm_bytes"] == str(k.nbytes)
        for window, first in ((-1, 10), (0, 0), (5, 25)):
            out = attend.query(conn, "s", 0, q, window)
            assert cosine(out, ref.attend(q.astype(np.float64), k[:, first:], v[:, first:])[0]) >= 0.9999
        text = "ERR ATTEND.PREFIX.STORE failed (values beyond 65504 do not fit into half precision)"
        assert str(attend.store(conn, "t", 0, k * np.float32(1e5), v)) == text


@pytest.mark.skipif(choice.has_metal(), reason="there is Metal")
def test_metal_asked_for_by_name_is_refused_where_it_is_not() -> None:
    with pytest.raises(RuntimeError, match="FATAL: --attention metal: there is no Metal here"):
        testing.Server(["--port", "0", "--memory-only", "--attention", "metal"])


def test_an_end_in_the_middle_of_a_computation() -> None:
    """A reply that is due still leaves, and the process ends with status 0."""
    k = normal(1, 8, 6000, 64)
    q = normal(3, 8, 400, 64)
    with testing.server("--kvcache", timeout=120) as server:
        got: list[Any] = []

        def call() -> None:
            with Raw(server.port, timeout=60) as conn:
                got.append(attend.query(conn, "s", 0, q))

        with Raw(server.port) as conn:
            attend.store(conn, "s", 0, k, k)
            thread = threading.Thread(target=call)
            thread.start()
            while conn.fields("ATTEND.PREFIX.INFO")["sdpa_queries"] == "0":
                pass
        assert server.stop() == 0
        thread.join()
        assert got[0][0].shape == q.shape
        assert "Traceback" not in server.output


def test_clients_that_leave_before_their_answer() -> None:
    k, q = normal(1, 4, 3000, 64), normal(3, 4, 100, 64)
    with testing.server("--kvcache") as server, Raw(server.port) as conn:
        attend.store(conn, "s", 0, k, k)
        for _ in range(5):
            sock = socket.create_connection(("127.0.0.1", server.port))
            sock.sendall(frame("ATTEND.PREFIX.QUERY", "s", 0, 4, 64, 1, q.tobytes()))
            sock.close()
        want = ref.attend(q.astype(np.float64), k, k)[0]
        assert np.abs(attend.query(conn, "s", 0, q)[0] - want).max() <= 1e-5
        assert "Traceback" not in server.output


def test_a_paused_server_computes_afterwards() -> None:
    k = normal(1, 2, 2000, 64)
    with testing.server("--kvcache") as server, Raw(server.port) as conn, Raw(server.port) as other:
        attend.store(conn, "s", 0, k, k)
        before = attend.query(conn, "s", 0, k[:, :1])
        other.ok("CLIENT", "PAUSE", 300, "ALL")
        assert np.array_equal(attend.query(conn, "s", 0, k[:, :1]), before)
        assert "cmdstat_attend.prefix.query" in conn.fields("INFO", "commandstats")
