"""The server in this process: start, accept, slow commands, timers, ends."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from pion.config import Options
from pion.errors import StartupError
from pion.net.server import Server, serve
from tests.support.plane import frame


@asynccontextmanager
async def running(**options: Any) -> AsyncIterator[tuple[Server, int]]:
    """A server in this event loop; ended in order when the block is left."""
    options.setdefault("memory_only", True)
    options.setdefault("port", 0)
    server = Server(Options(**options))
    async with trio.open_nursery() as nursery:
        port = await nursery.start(server.run)
        try:
            yield server, port
        finally:
            server.stopping.set()


async def connect(port: int) -> trio.SocketStream:
    stream = await trio.open_tcp_stream("127.0.0.1", port)
    _streams.append(stream)
    return stream


@pytest.fixture(autouse=True)
async def close_streams() -> AsyncIterator[None]:
    """Closes what the test connected."""
    yield
    while _streams:
        await _streams.pop().aclose()


_streams: list[trio.SocketStream] = []


async def accepts(port: int) -> bool:
    try:
        await connect(port)
    except OSError:
        return False
    return True


async def exactly(stream: trio.abc.ReceiveStream, n: int) -> bytes:
    data = b""
    with trio.fail_after(20):
        while len(data) < n:
            more = await stream.receive_some(n - len(data))
            if not more:
                raise EOFError(data)
            data += more
    return data


async def ask(stream: trio.SocketStream, reply: bytes, *parts: bytes | str | int) -> None:
    await stream.send_all(frame(*parts))
    assert await exactly(stream, len(reply)) == reply


async def until_closed(stream: trio.SocketStream) -> bytes:
    data = b""
    with trio.fail_after(20):
        while more := await stream.receive_some(65536):
            data += more
    return data


async def test_serves_and_ends_in_order(capsys: pytest.CaptureFixture[str]):
    async with running() as (server, port):
        stream = await connect(port)
        await ask(stream, b"+PONG\r\n", "PING")
        await ask(stream, b"+OK\r\n", "SET", "a", "1")
        await ask(stream, b"$1\r\n1\r\n", "GET", "a")
        await ask(stream, b":1\r\n", "HSET", "h", "f", "v")
        assert server.plane.connected == 1
        assert f"Ready to accept connections on 127.0.0.1:{port}\n" in capsys.readouterr().out
    assert await until_closed(stream) == b""
    with pytest.raises(OSError, match="all attempts to connect"):
        await connect(port)


async def test_a_slow_command_does_not_hold_up_others():
    async with running() as (server, port):
        slow, other = await connect(port), await connect(port)
        release = trio.Event()

        async def held(fn: Any, *args: Any) -> Any:
            await release.wait()
            return fn(*args)

        server.state.to_thread = held
        original = server.dispatcher.__call__

        def dispatch(conn: Any, argv: list[Any]) -> Any:
            if argv[0] == b"WAITING":
                return server.state.to_thread(lambda: [b"done"])
            if argv[0] == b"FAILING":
                return fail()
            return original(conn, argv)

        async def fail() -> None:
            raise RuntimeError("on purpose")

        server.dispatcher = dispatch  # type: ignore[assignment]
        await slow.send_all(frame("WAITING") + frame("PING"))
        await ask(other, b"+PONG\r\n", "PING")
        release.set()
        assert await exactly(slow, 21) == b"*1\r\n$4\r\ndone\r\n+PONG\r\n"
        await ask(other, b"-ERR internal error\r\n", "FAILING")


async def test_a_graceful_end_waits_for_replies_that_are_due():
    release = trio.Event()

    async def later() -> bytes:
        await release.wait()
        return b"done"

    async with running() as (server, port):
        stream = await connect(port)
        original = server.dispatcher
        server.dispatcher = lambda conn, argv: later() if argv[0] == b"LATER" else original(conn, argv)  # type: ignore
        await stream.send_all(frame("LATER"))
        with trio.fail_after(20):
            while not any(conn.pending for conn in server.plane.connections):
                await trio.lowlevel.checkpoint()
        server.stopping.set()
        with trio.fail_after(20):
            while await accepts(port):
                await trio.lowlevel.checkpoint()
        release.set()
        assert await until_closed(stream) == b"$4\r\ndone\r\n"


async def test_too_many_clients_are_told_so():
    async with running(maxclients=2) as (server, port):
        first, second = await connect(port), await connect(port)
        await ask(first, b"+PONG\r\n", "PING")
        await ask(second, b"+PONG\r\n", "PING")
        third = await connect(port)
        assert await until_closed(third) == b"-ERR max number of clients reached\r\n"
        assert server.plane.stats["rejected"] == 1
        await first.aclose()
        with trio.fail_after(20):
            while server.plane.connected > 1:
                await trio.lowlevel.checkpoint()
        fourth = await connect(port)
        await ask(fourth, b"+PONG\r\n", "PING")


async def test_idle_connections_are_closed_when_asked_for():
    async with running(timeout=1) as (server, port):
        stream = await connect(port)
        await ask(stream, b"+PONG\r\n", "PING")
        assert await until_closed(stream) == b""
        server.options.timeout = 0


async def test_due_keys_are_deleted_without_being_asked_for():
    async with running() as (server, port):
        stream = await connect(port)
        await ask(stream, b"+OK\r\n", "SET", "k", "v", "PX", "30")
        with trio.fail_after(20):
            while server.engine.keyspace.expired == 0:
                await trio.lowlevel.checkpoint()
        assert server.engine.keyspace.size(0) == 0


async def test_only_the_thread_of_the_plane_writes_the_log(tmp_path: Path):
    """A worker that flushed it too, at the same time, would give values back that the other is writing."""
    async with running(memory_only=False, dir=str(tmp_path / "data")) as (server, _):
        store = server.engine.keyspace_store
        assert store is not None
        left = []
        for _ in range(5):  # the server's own tick may come between
            server.engine.keyspace.set(0, b"key", b"value")
            await trio.to_thread.run_sync(store.fsync)
            left.append(server.engine.keyspace.log_pending)
        assert any(left)


async def test_a_password_keeps_the_fast_path_shut():
    async with running(requirepass="secret") as (_, port):
        stream = await connect(port)
        await ask(stream, b"-NOAUTH Authentication required.\r\n", "GET", "a")
        await ask(stream, b"-NOAUTH Authentication required.\r\n", "SET", "a", "1")
        await ask(stream, b"+OK\r\n", "AUTH", "secret")
        await ask(stream, b"$-1\r\n", "GET", "a")


async def test_a_unix_socket_beside_tcp(tmp_path: Path):
    path = tmp_path / "s"
    async with running(unixsocket=str(path)) as (_, port):
        unix = await trio.open_unix_socket(str(path))
        _streams.append(unix)
        await ask(unix, b"+OK\r\n", "SET", "a", "1")
        tcp = await connect(port)
        await ask(tcp, b"$1\r\n1\r\n", "GET", "a")
    assert not path.exists()


async def test_only_a_unix_socket(tmp_path: Path):
    async with running(port=-1, unixsocket=str(tmp_path / "s")) as (_, port):
        assert port == 0
        unix = await trio.open_unix_socket(str(tmp_path / "s"))
        _streams.append(unix)
        await ask(unix, b"+PONG\r\n", "PING")


async def test_errors_at_the_start_leave_nothing_open(tmp_path: Path):
    with pytest.raises(StartupError, match="nothing to listen on"):
        await serve(Options(port=-1, memory_only=True))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StartupError, match=f"cannot bind port {port}"):
            await serve(Options(port=port, memory_only=True))
    (tmp_path / "file").write_text("x")
    with pytest.raises((StartupError, OSError)):
        await serve(Options(port=0, dir=str(tmp_path / "file")))


async def test_the_end_of_the_task_ends_the_server():
    server = Server(Options(port=0, memory_only=True))
    async with trio.open_nursery() as nursery:
        port = await nursery.start(server.run)
        stream = await connect(port)
        await ask(stream, b"+PONG\r\n", "PING")
        nursery.cancel_scope.cancel()
    assert await until_closed(stream) == b""


async def test_a_web_page_cannot_send_commands() -> None:
    """Nothing behind an HTTP request line or its Host header is run."""
    async with running() as (server, port):
        for head in (b"POST / HTTP/1.1\r\n", b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n"):
            page = await connect(port)
            await page.send_all(head + b"\r\nSET k page\r\n")
            with trio.fail_after(5):
                while await page.receive_some(65536):
                    pass
        assert not server.engine.keyspace.exists(0, b"k")
