"""The server as a process of its own, through `pion.testing.server`."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from pion import testing
from tests.support.plane import frame
from tests.support.process import Process
from tests.support.raw import Raw


def raw(port: int) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", port))
    sock.settimeout(20)
    return sock


def test_a_process_ends_on_sigterm(tmp_path: Path):
    with testing.server(dir=tmp_path / "data") as server:
        with raw(server.port) as sock:
            sock.sendall(frame("SET", "kept", "yes"))
            assert sock.recv(100) == b"+OK\r\n"
        assert server.anonymous_bytes() < 60 << 20
        assert server.stop() == 0
        server.restart()
        with raw(server.port) as sock:
            sock.sendall(frame("GET", "kept"))
            assert sock.recv(100) == b"$3\r\nyes\r\n"
        server.kill()
        server.restart()
        with raw(server.port) as sock:
            sock.sendall(frame("GET", "kept"))
            assert sock.recv(100) == b"$3\r\nyes\r\n"
    assert server.process.returncode == 0


def test_the_ready_line_is_one_write(tmp_path: Path):
    """Unbuffered too: whoever waits for it would otherwise find a line of the log within it."""
    reader, writer = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    reader.settimeout(30)
    command = [sys.executable, "-m", "pion.cli", "--port", "0", "--dir", str(tmp_path), "--kvcache"]
    process = subprocess.Popen(command, stdout=writer, env={**os.environ, "PYTHONUNBUFFERED": "1"})
    try:
        writes: list[bytes] = []
        while len(writes) < 2:
            writes += filter(None, [reader.recv(4096)])
        assert writes[0].startswith(b"pion-server ")
        assert writes[1].startswith(b"Ready to accept connections on 127.0.0.1:")
        assert all(write.endswith(b"\n") for write in writes)
    finally:
        process.terminate()
        assert process.wait(30) == 0
        reader.close()
        writer.close()


@pytest.mark.parametrize("given", [[], ["--max-bytes", "64mb", "--max-sessions", "1000", "--workers", "3"]])
def test_config_get_answers_what_the_running_server_uses(tmp_path: Path, given: list[str]) -> None:
    with Process(tmp_path / "data", *given) as process, Raw(process.port) as conn:

        def get(name: str) -> str:
            found = conn.ok("CONFIG", "GET", name)
            assert found[0] == name.encode()
            return str(found[1].decode())

        assert get("max-bytes") == conn.fields("KV.PREFIX.INFO")["vstore_max_bytes"]
        assert int(get("max-bytes")) == 64 << 20 if given else int(get("max-bytes")) > 1 << 20
        assert get("max-sessions") == ("1000" if given else "65536")
        assert get("workers") == ("3" if given else "2")
        assert get("dir") == str(tmp_path / "data")
        assert get("port") == str(process.port)
        assert get("appendfsync") == "everysec"
        assert get("unixsocketperm") == "700"
        for name in ("max-bytes", "max-sessions", "dir", "workers", "port"):
            assert conn.ok("CONFIG", "SET", name, get(name)) == "OK", "nothing is changed"
            refused = conn.call("CONFIG", "SET", name, "7")
            assert f"argument '{name}') - can't set immutable config" in str(refused)


def test_a_second_signal_ends_a_patient_server_at_once():
    with testing.server() as server:
        sock = raw(server.port)
        sock.sendall(frame("SET", "v", "x" * (8 << 20)))
        assert sock.recv(100) == b"+OK\r\n"
        sock.sendall(frame("GET", "v") * 20)  # and never read: the graceful end would wait
        assert sock.recv(3) == b"$83"
        server.process.send_signal(signal.SIGINT)
        while "shutting down" not in server.output:
            server.wait_output(20)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(20) == 0
        sock.close()


def test_the_helper_tells_why_a_server_did_not_start():
    with pytest.raises(RuntimeError, match="the server ended with status"), testing.server("--no-such-flag"):
        pass


def test_the_server_imports_neither_numpy_nor_mlx():
    code = "import pion.net.server, pion.cli, sys; print(sorted({'numpy', 'mlx'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_many_clients_come_and_go():
    with testing.server("--maxclients", "500") as server:

        def visit(count: int) -> None:
            for _ in range(count):
                with raw(server.port) as sock:
                    sock.sendall(b"PING\r\n")
                    assert sock.recv(100) == b"+PONG\r\n"

        threads = [threading.Thread(target=visit, args=(50,)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        end = time.monotonic() + 20
        with raw(server.port) as sock:
            told = b""
            while b"connected_clients:1\r\n" not in told:  # the last ones may not have been seen to leave
                assert time.monotonic() < end, told
                sock.sendall(b"INFO clients\r\n")
                told = sock.recv(4096)
        assert len(os.listdir(f"/proc/{server.pid}/fd")) < 40
