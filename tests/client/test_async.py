"""The trio client: cancellation (case A13), draining (case A12), pools, TLS."""

from __future__ import annotations

import os
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import trio
import trustme

from pion.client.async_ import AsyncClient
from pion.client.errors import CallTimeoutError, ConnectionLostError
from pion.errors import AuthenticationError, CommandError


class Proxy:
    """Forwards at once towards the server; holds everything that comes back for `delay` seconds."""

    def __init__(self, port: int, delay: float) -> None:
        self.target, self.delay = port, delay
        self.port = 0
        self.forwarded = trio.Event()
        self.connections = 0

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        self.port = listeners[0].socket.getsockname()[1]
        await trio.serve_listeners(self._serve, listeners, task_status=task_status)  # type: ignore[arg-type]

    async def _serve(self, near: trio.SocketStream) -> None:
        self.connections += 1
        far = await trio.open_tcp_stream("127.0.0.1", self.target)
        async with near, far, trio.open_nursery() as nursery:
            nursery.start_soon(self._copy, far, near, self.delay)
            await self._copy(near, far, 0)
            nursery.cancel_scope.cancel()

    async def _copy(self, source: trio.SocketStream, sink: trio.SocketStream, delay: float) -> None:
        try:
            async for data in source:
                if delay:
                    await trio.sleep(delay)
                await sink.send_all(data)
                if not delay and b"foo" in data:
                    self.forwarded.set()
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            return


@pytest.fixture
def server(byte_server: Any) -> Any:
    server = byte_server()
    server.data.update({b"foo": b"foo's value", b"bar": b"bar's value", b"foo-large": os.urandom(8 << 20)})
    return server


@pytest.fixture
async def proxy(server: Any, nursery: trio.Nursery) -> AsyncIterator[Proxy]:
    proxy = Proxy(server.port, 0.1)
    await nursery.start(proxy.run)
    yield proxy
    nursery.cancel_scope.cancel()


CALLS: dict[str, Any] = {
    "call": lambda client: client.call("GET", "foo"),
    "pipeline": lambda client: client.pipeline([["GET", "bar"], ["GET", "foo"], ["PING"]] * 50),
    "large fetch": lambda client: client.call("GET", "foo-large", out=[bytearray(8 << 20)]),
    "large store": lambda client: client.call("SET", "foo-stored", bytes(32 << 20)),
}


@pytest.mark.parametrize("name", CALLS)
async def test_a13_a_cancelled_call_never_answers_the_next_one(name: str, proxy: Proxy) -> None:
    async with AsyncClient(host="127.0.0.1", port=proxy.port, max_connections=1) as client:
        assert await client.ping()
        with trio.move_on_after(0.001) as scope:
            await CALLS[name](client)
        assert scope.cancelled_caught
        assert await client.call("GET", "bar") == b"bar's value"
        assert await client.ping()
    assert proxy.connections == 2


@pytest.mark.parametrize("name", CALLS)
async def test_a13_cancelled_after_the_server_has_the_command(name: str, proxy: Proxy) -> None:
    async with AsyncClient(host="127.0.0.1", port=proxy.port, max_connections=1) as client:
        assert await client.ping()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(CALLS[name], client)
            await proxy.forwarded.wait()
            nursery.cancel_scope.cancel()
        assert await client.call("GET", "bar") == b"bar's value"
        assert await client.ping()


async def test_a13_a_timeout_closes_the_connection_too(proxy: Proxy, server: Any, answers: Any) -> None:
    server.answer = lambda peer, argv: (
        answers["silence"] if argv == [b"GET", b"foo"] else answers["ordinary"](peer, argv)
    )
    async with AsyncClient(host="127.0.0.1", port=proxy.port, timeout=0.5) as client:
        with pytest.raises(CallTimeoutError, match=r"nothing moved for 0.5 s"):
            await client.call("GET", "foo")
        assert await client.call("GET", "bar") == b"bar's value"


async def test_a12_large_pipelines_both_ways_complete(byte_server: Any) -> None:
    server = byte_server(rcvbuf=65536)
    server.data[b"big"] = os.urandom(8 << 20)
    blob = os.urandom(16 << 20)
    async with AsyncClient(host="127.0.0.1", port=server.port, timeout=30) as client:
        replies = await client.pipeline(
            [["GET", "big"], ["SET", "b", blob], ["GET", "b"], ["SET", "c", blob], ["PING"]]
        )
    assert replies == [server.data[b"big"], "OK", blob, "OK", "PONG"]


async def test_tasks_share_a_client(server: Any) -> None:
    async with AsyncClient(f"pion://127.0.0.1:{server.port}", max_connections=3) as client:

        async def work(me: int) -> None:
            for i in range(50):
                assert await client.call("ECHO", f"{me}-{i}") == f"{me}-{i}".encode()

        async with trio.open_nursery() as nursery:
            for me in range(10):
                nursery.start_soon(work, me)
    assert server.accepted <= 3


async def test_errors_and_reconnects(server: Any, answers: Any) -> None:
    async with AsyncClient(f"pion://127.0.0.1:{server.port}") as client:
        with pytest.raises(CommandError, match="unknown command 'NOPE'"):
            await client.call("NOPE")
        replies = await client.pipeline([["PING"], ["NOPE"]], raise_on_error=False)
        assert isinstance(replies[1], CommandError)
        server.drop_connections()
        server.socks[-1].close()
        assert await client.ping()
        server.answer = lambda peer, argv: answers["error"]("NOAUTH Authentication required.")
        server.drop_connections()
        server.socks[-1].close()
        with pytest.raises(AuthenticationError):
            await client.ping()
    with pytest.raises(ConnectionLostError, match="client is closed"):
        await client.ping()
    with pytest.raises(ConnectionLostError, match="cannot connect"):
        await AsyncClient(path="/nowhere/pion.sock").ping()


async def test_tls(byte_server: Any, tmp_path: Path) -> None:
    authority = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    server = byte_server(context=context)
    blob = os.urandom(5 << 20)
    async with AsyncClient(f"pions://127.0.0.1:{server.port}", ssl_ca=str(tmp_path / "ca.pem"), timeout=30) as client:
        assert await client.pipeline([["SET", "k", blob], ["GET", "k"], ["GET", "k"]]) == ["OK", blob, blob]
    async with AsyncClient(f"pions://127.0.0.1:{server.port}") as client:
        with pytest.raises(ssl.SSLCertVerificationError):
            await client.ping()


async def test_a_busy_pool_is_an_error_after_the_timeout(proxy: Proxy) -> None:
    async with AsyncClient(host="127.0.0.1", port=proxy.port, max_connections=1, timeout=0.3) as client:
        assert await client.ping()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.pipeline, [["GET", "foo-large"]] * 3)
            await proxy.forwarded.wait()
            client._pool.address = type(client.address)(timeout=0.01)
            with pytest.raises(CallTimeoutError, match="stayed busy"):
                await client.ping()
            nursery.cancel_scope.cancel()
