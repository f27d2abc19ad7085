"""The client for threads."""

from __future__ import annotations

import ssl as tls
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any, Final, TypeVar

from pion._core.buffers import BufferPool
from pion.client import calls, tensors
from pion.client.address import Address
from pion.client.attend_lanes import AttendLanes
from pion.client.attend_methods import AttendMethods
from pion.client.connection import Command, Steps
from pion.client.mapped import MappedKV, map_prefix
from pion.client.pool import Pool
from pion.client.tensors import KV, Layers
from pion.wire.resp import Part

__all__ = ["Client"]

T = TypeVar("T")

_UNSET: Final = -1.0


class Client(AttendMethods):
    """A client of a Pion (or Redis) server. Safe to share between threads and to keep across a fork.

    Connections are opened when needed, kept for reuse, and opened again after the server went away. A call that was
    interrupted (error, timeout, Ctrl-C) closes its connection, so that no later call can read its reply.

    Args:
        url: ``pion://[[user]:password@]host[:port][/db]``; see ``Address.of`` for all forms. None: the arguments.
        host, port, path: where the server is, if not in the URL; `path` is a Unix socket.
        username, password: credentials.
        ssl: True, or an ``ssl.SSLContext``; `ssl_ca`, `ssl_cert`, `ssl_key` are files for one.
        db: database of the ordinary keyspace; prefixes are in none, all connections see the same.
        protocol: 3, which falls back to 2 at an old server, or 2.
        timeout: seconds without progress after which a call fails; None waits forever. Default 60.
        connect_timeout: seconds for connecting and logging in.
        client_name: name shown by CLIENT LIST.
        max_connections: connections open at the same time at most.

    Raises:
        ValueError: a malformed URL, or arguments that exclude each other (TLS on a Unix socket). What an argument says
            wins over the URL. The server is not contacted yet.

    Error handling:
        Every call may raise ``CommandError`` (the server refused; subclasses by kind), ``ConnectionLostError`` (a
        ``ConnectionError``), ``CallTimeoutError`` (a ``TimeoutError``), and ``ArgumentError`` (a ``ValueError``) for a
        str that has no UTF-8.
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
        self._pool = Pool(self.address, max_connections)
        self._buffers = BufferPool()
        self._attend = AttendLanes(self.address, self._run)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.address)!r})"

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections; calls that are running end first."""
        self._attend.close()
        self._pool.close()

    def _run(self, steps: Steps[T]) -> T:
        return self._pool.run(steps, self.address.timeout)

    # --- commands -------------------------------------------------------------------------------------------------

    def call(self, *parts: Part, out: Sequence[Any] | None = None) -> Any:
        """Send one command and return its reply.

        Args:
            parts: the command and its arguments: bytes-like, str, int or float.
            out: writable buffers; the i-th bulk of the reply is received into ``out[i]`` when it has exactly that
                size, and ``out[i]`` itself then stands in the reply.

        Returns:
            bytes for bulk strings, str for status lines, int, float, bool, None, list, dict, set.
        """
        return self._run(calls.call(parts, out))

    def pipeline(self, commands: Iterable[Command], *, raise_on_error: bool = True) -> list[Any]:
        """Send many commands without waiting in between; replies are taken in while commands are still written.

        Args:
            commands: sequences of parts; a generator is read as the socket takes its commands.
            raise_on_error: raise the first error reply, after all replies were read; otherwise errors are
                ``CommandError`` objects in the list.
        """
        return self._run(calls.pipeline(commands, raise_on_error))

    def ping(self) -> bool:
        """True when the server answers."""
        return bool(self.call("PING") == "PONG")

    # --- prefixes -------------------------------------------------------------------------------------------------

    def store(
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
        """Store a prefix: register it with its shape, then all its rows.

        Other clients see a HIT only once every row is there. Acknowledged rows survive a crash of the server; call
        :meth:`commit` for power loss.

        Args:
            ns: its name, 1 to 200 bytes.
            k, v: arrays ``(layers, heads, tokens, head_dim)``, or lists of arrays per layer. float16, float32, or
                uint16 with ``dtype="bfloat16"``.
            vquant: storage format; ``native`` keeps every word, ``fp16`` keeps both 16-bit dtypes and rounds float32,
                the others (``int8``, ``fp8``, ``mlx4g32``, ``turbo4``, ``turbo3``, ``turbo2``) quantize.
            k_format, v_format: storage formats of K and of V, instead of `vquant`.
            digest: hex digest of what the rows belong to (token ids, model); a fetch with another digest is refused,
                and rows that come after somebody replaced the prefix are too. Without one, two who store under one
                name at a time can mix their rows.
            prefill_ms: what computing it took, for the statistics.
            scope, parent: group and lineage of the prefix.
            rope: base of the rotary embedding the keys carry.
            blocks: ``(block_size, hashes)``, u64 hashes in token order, for MEMBERSHIP.
            replace: replace an entry with another digest, format or shape.

        Raises:
            MismatchError: the name holds something else, and not `replace`. Nothing was written.
            ValueError, TypeError: the arrays do not fit together; the server was not contacted.
        """
        self._run(
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

    def fetch(
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
        """Fetch a whole prefix, and credit the hit in the server's statistics.

        With `out` everything takes one round trip, without it two. Without `out` the arrays lie in memory that is
        reused once the last view of them is gone: keep the arrays, or copy them. Quantized rows cross the wire as they
        are stored and are decoded here.

        Args:
            ns: its name.
            out: ``(k, v)`` arrays (or lists per layer) to receive into, of exactly the stored shape and dtype. Rows
                arrive without a copy when the memory of a layer is ``(tokens, heads, head_dim)``, as in arrays that
                were fetched.
            dtype: ``"bfloat16"`` when `out` is uint16.
            digest: what the rows must belong to.
            tokens, prefill_ms: for the statistics, see KV.PREFIX.LOOKUP.
            heads: for a prefix that was registered without HEADS.

        Returns:
            k, v and their dtype. Entries all in fp16, or all in bf16, come back in their own words, all others as
            float32.

        Raises:
            PrefixMissError: it is not there, or not complete.
            IncompleteError: fewer bytes came than the prefix has; nothing may be used.
            MismatchError: another digest, or `out` has another shape or dtype.
        """
        return self._run(
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

    def map(self, ns: str | bytes, *, heads: int | None = None) -> MappedKV:
        """A whole prefix of a server on this machine, mapped: nothing is copied, nothing is sent.

        The server hands out a descriptor of its own file that can only be read. What is mapped stays as it is, whatever
        becomes of the prefix; its memory is the server's page cache. Looking it up is not counted as a hit.

        Args:
            ns: its name. It must have been registered with its shape (`store` does) and be complete.
            heads: for a prefix that was registered without HEADS.

        Raises:
            LaneError: the server is not on this machine, or hands out no files (to us).
            PrefixMissError: the prefix is not there, or not complete.
            CommandError: the server refused.
            IncompleteError: it went away meanwhile.
        """
        return self._run(map_prefix(ns, self.address, heads=heads))

    def lookup(
        self, ns: str | bytes, *, digest: str | None = None, tokens: int | None = None, prefill_ms: int | None = None
    ) -> bool:
        """Whether the whole prefix is there; a hit is credited in the server's statistics.

        Raises:
            MismatchError: it is there for another digest.
        """
        return self._run(calls.lookup(tensors.lookup(ns, digest, tokens, prefill_ms)))

    def drop(self, *ns: str | bytes) -> int:
        """Drop prefixes, K, V and state together; how many were held."""
        return self._run(calls.drop(ns))

    def commit(self) -> None:
        """Return once everything acknowledged so far would survive a power loss."""
        self._run(calls.commit())

    def save(self, path: str | None = None) -> None:
        """Commit and checkpoint the index; with a relative `path`, write a self-contained copy there."""
        self._run(calls.save(path))

    def stats(self) -> dict[str, int | float]:
        """The figures of PION.STATS by name."""
        return self._run(calls.stats())
