"""The client for trio."""

from __future__ import annotations

import ssl as tls
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any, Final, TypeVar

from pion._core.buffers import BufferPool
from pion.client import calls, tensors
from pion.client.address import Address
from pion.client.async_pool import AsyncPool
from pion.client.attend import Attend
from pion.client.attend_methods import AsyncAttendMethods
from pion.client.connection import Command, Steps
from pion.client.tensors import KV, Layers
from pion.wire.resp import Part

__all__ = ["AsyncClient"]

T = TypeVar("T")

_UNSET: Final = -1.0


class AsyncClient(AsyncAttendMethods):
    """A client of a Pion (or Redis) server for the tasks of one ``trio.run``; see ``Client`` for its threaded twin.

    Connections are opened when needed, kept for reuse, and opened again after the server went away. A call that was
    interrupted (error, timeout, cancellation) closes its connection, so that no later call can read its reply.

    The arguments, their meaning and the errors are those of ``Client``.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        host: str | None = None,
        port: int | None = None,
        path: str | None = None,
        username: str | None = None,
        password: str | None = None,
        ssl: bool | tls.SSLContext | None = None,
        ssl_ca: str | None = None,
        ssl_cert: str | None = None,
        ssl_key: str | None = None,
        db: int | None = None,
        protocol: int | None = None,
        timeout: float | None = _UNSET,
        connect_timeout: float | None = None,
        client_name: str | None = None,
        max_connections: int = 16,
    ) -> None:
        self.address = Address.of(
            url,
            host=host,
            port=port,
            path=path,
            username=username,
            password=password,
            ssl=ssl,
            ssl_ca=ssl_ca,
            ssl_cert=ssl_cert,
            ssl_key=ssl_key,
            db=db,
            protocol=protocol,
            connect_timeout=connect_timeout,
            client_name=client_name,
            **({} if timeout == _UNSET else {"timeout": timeout}),
        )
        self._pool = AsyncPool(self.address, max_connections)
        self._buffers = BufferPool()
        self._attend = Attend()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.address)!r})"

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections; calls that are running end first."""
        self._pool.close()

    async def _run(self, steps: Steps[T]) -> T:
        return await self._pool.run(steps, self.address.timeout)

    # --- commands -------------------------------------------------------------------------------------------------

    async def call(self, *parts: Part, out: Sequence[Any] | None = None) -> Any:
        """Send one command and return its reply; see ``Client.call``."""
        return await self._run(calls.call(parts, out))

    async def pipeline(self, commands: Iterable[Command], *, raise_on_error: bool = True) -> list[Any]:
        """Send many commands without waiting in between; see ``Client.pipeline``."""
        return await self._run(calls.pipeline(commands, raise_on_error))

    async def ping(self) -> bool:
        """True when the server answers."""
        return bool(await self.call("PING") == "PONG")

    # --- prefixes -------------------------------------------------------------------------------------------------

    async def store(
        self,
        ns: str | bytes,
        k: Layers,
        v: Layers,
        *,
        vquant: str = "native",
        k_format: str | None = None,
        v_format: str | None = None,
        dtype: str | None = None,
        digest: str | None = None,
        prefill_ms: int = 0,
        scope: str | bytes | None = None,
        parent: str | bytes | None = None,
        rope: float | None = None,
        blocks: tuple[int, Any] | None = None,
        replace: bool = False,
    ) -> None:
        """Store a prefix; see ``Client.store``."""
        await self._run(
            tensors.store(
                ns,
                k,
                v,
                vquant=vquant,
                k_format=k_format,
                v_format=v_format,
                dtype=dtype,
                digest=digest,
                prefill_ms=prefill_ms,
                scope=scope,
                parent=parent,
                rope=rope,
                blocks=blocks,
                replace=replace,
            )
        )

    async def fetch(
        self,
        ns: str | bytes,
        *,
        out: tuple[Layers, Layers] | None = None,
        dtype: str | None = None,
        digest: str | None = None,
        tokens: int | None = None,
        prefill_ms: int | None = None,
        heads: int | None = None,
    ) -> KV:
        """Fetch a whole prefix; see ``Client.fetch``."""
        return await self._run(
            tensors.fetch(
                ns,
                self._buffers,
                out=out,
                dtype=dtype,
                digest=digest,
                tokens=tokens,
                prefill_ms=prefill_ms,
                heads=heads,
            )
        )

    async def lookup(
        self, ns: str | bytes, *, digest: str | None = None, tokens: int | None = None, prefill_ms: int | None = None
    ) -> bool:
        """Whether the whole prefix is there; a hit is credited in the server's statistics.

        Raises:
            MismatchError: it is there for another digest.
        """
        return await self._run(calls.lookup(tensors.lookup(ns, digest, tokens, prefill_ms)))

    async def drop(self, *ns: str | bytes) -> int:
        """Drop prefixes, K, V and state together; how many were held."""
        return await self._run(calls.drop(ns))

    async def commit(self) -> None:
        """Return once everything acknowledged so far would survive a power loss."""
        await self._run(calls.commit())

    async def save(self, path: str | None = None) -> None:
        """Commit and checkpoint the index; with a relative `path`, write a self-contained copy there."""
        await self._run(calls.save(path))

    async def stats(self) -> dict[str, int | float]:
        """The figures of PION.STATS by name."""
        return await self._run(calls.stats())
