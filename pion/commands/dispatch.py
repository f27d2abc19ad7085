"""From a parsed command to a reply value: login gate, table lookup, memory gate, pause, errors, accounting."""

from __future__ import annotations

import functools
import logging
import os
import time
from collections.abc import Callable, Coroutine
from types import CoroutineType
from typing import Any

from pion import errors
from pion._core.plane import PENDING
from pion._core.stream import Sink
from pion.auth import Authenticator
from pion.commands import table
from pion.commands.commits import Later, settled
from pion.commands.state import CommandStats, ServerState
from pion.errors import AuthenticationError, CommandError, OutOfMemoryError, StorageError
from pion.store.entries import CrowdedError
from pion.wire.resp import Err, Raw

log = logging.getLogger("pion.commands")

NO_REPLY = Raw(b"")
_HTTP = (b"post", b"host:")  # the first words of the lines a browser sends
_INTERNAL = Err(errors.INTERNAL)


class Context:
    """What a handler may touch. One per connection; cheap to pass.

    Attributes:
        engine: the `Engine` (or anything with a `keyspace` for the ordinary commands).
        conn: the connection the command came from.
        plane: the network plane, None in tests and for embedded use.
        options: `pion.config.Options`.
        server: `ServerState`.
        auth: `Authenticator`.
    """

    __slots__ = ("auth", "conn", "engine", "options", "plane", "server")

    def __init__(
        self, engine: Any, conn: Any, plane: Any, options: Any, server: ServerState, auth: Authenticator
    ) -> None:
        self.engine = engine
        self.conn = conn
        self.plane = plane
        self.options = options
        self.server = server
        self.auth = auth

    @property
    def ks(self) -> Any:
        """The ordinary keyspace."""
        return self.engine.keyspace

    @property
    def db(self) -> int:
        """The database this connection selected."""
        return int(self.conn.db)

    def now_ms(self) -> int:
        """Unix time in milliseconds, as TTLs count."""
        return int(self.engine.keyspace.now_ms)

    def computed(self, fn: Any) -> Any:
        """The reply that a call which keeps a core busy returns; computed in a thread where there are others."""
        return fn() if self.server.computing is None else self.server.computing.later(fn)

    async def in_thread(self, fn: Any, *args: Any) -> Any:
        """Runs a blocking call without holding up other connections.

        What it raises comes back in a list that is emptied here. Raised through the thread's machinery, or returned, it
        would be in a reference cycle with the frames of its traceback and those that called them, and hold their
        arguments, files among them, until the next garbage collection.
        """
        failed: list[Exception] = []
        value = await self.server.to_thread(_attempt, failed, fn, args)
        if not failed:
            return value
        error = failed.pop()
        try:
            raise error
        finally:
            del error


def _attempt(failed: list[Exception], fn: Any, args: tuple[Any, ...]) -> Any:
    try:
        return fn(*args)
    except Exception as error:
        failed.append(error)
        return None


class Dispatcher:
    """Callable `(conn, argv) -> value | coroutine`; the plane's handler.

    A coroutine never raises `CommandError`: it ends with a reply value like a plain call.

    Args:
        engine: passed through to the handlers.
        options: `pion.config.Options` or None.
        auth: users; None = open.
        server: counters and hooks; None = a fresh `ServerState`.
    """

    def __init__(
        self, engine: Any, options: Any = None, auth: Authenticator | None = None, server: ServerState | None = None
    ) -> None:
        self.engine = engine
        self.options = options
        self.auth = auth or Authenticator()
        self.server = server or ServerState()
        self.server.engine = engine
        if options is not None:
            self.server.bound_memory(options.maxmemory, options.maxmemory_policy)
            self.server.attention.configure(options)
            if engine is not None:
                engine.on_new_meaning(self.server.attention.redefined)
            self.server.slowlog.threshold_us = options.slowlog_log_slower_than
            self.server.slowlog.max_len = options.slowlog_max_len
        self._relieving: dict[Any, Any] = {}  # event by entry whose compaction writes wait for
        self._plane: Any = None
        self._fast_ids: dict[str, int] = {}

    @property
    def plane(self) -> Any:
        """The plane this dispatcher answers for; set it once both exist."""
        return self._plane

    @plane.setter
    def plane(self, plane: Any) -> None:
        from pion._core import plane as core

        self._plane = self.server.plane = plane
        self.server.choose_door()
        self._fast_ids = {record.name: getattr(core, f"FAST_{record.fast}") for record in self._fast_records()}

    def _fast_records(self) -> list[table.Command]:
        """The commands the plane may run: C knows neither the feature gate nor the required prefix of a namespace."""
        namespaces = getattr(self.engine, "kvcache", False) and not getattr(self.options, "ns_prefix", "")
        return [record for record in table.fast_commands() if record.group != "prefix" or namespaces]

    def fast_table(self) -> list[tuple[int, bytes, int, int]]:
        """`(id, name, arity, flags)` of every fast command, for the plane's constructor."""
        from pion._core import plane as core

        return [
            (
                getattr(core, f"FAST_{record.fast}"),
                record.name.encode(),
                record.arity,
                (core.FLAG_WRITE if record.write else 0) | (core.FLAG_DENYOOM if record.denyoom else 0),
            )
            for record in self._fast_records()
        ]

    # --- connections -----------------------------------------------------------------------------------------------

    def connected(self, conn: Any) -> None:
        """A new connection: without a configured password it is logged in at once."""
        if self.auth.open:
            conn.user = self.auth.default
            conn.authenticated = True

    def context(self, conn: Any) -> Context:
        """The connection's context, made on first use."""
        ctx = conn.data.get("context")
        if ctx is None:
            ctx = conn.data["context"] = Context(self.engine, conn, self._plane, self.options, self.server, self.auth)
        return ctx  # type: ignore[no-any-return]

    # --- commands --------------------------------------------------------------------------------------------------

    def __call__(self, conn: Any, argv: list[Any]) -> Any:
        """Runs one command.

        Returns:
            A reply value, or a coroutine that returns one (to be awaited by the network layer).
        """
        try:
            record = self._admit(conn, argv)
        except CommandError as error:
            self._rejected(argv, error)
            if bytes(argv[0]).lower() in _HTTP:
                # A web page can make a browser send its own lines to a port of this machine.
                log.warning("%s speaks HTTP; its connection was closed", conn.peer)
                self._hang_up(conn)
                return NO_REPLY
            return self._reply(conn, _refusal(error), None)
        if self.server.paused is not None and self.server.holds(record.write) and record.name != "client|unpause":
            return self._held(conn, record, argv)
        return self._execute(conn, record, argv)

    def _hang_up(self, conn: Any) -> None:
        if self._plane is not None:
            self._plane.close(conn, False)
        else:
            conn.closing = True

    def stream_open(self, conn: Any, argv: list[bytes], nbytes: int) -> Any:
        """The plane meets a large argument: returns the Sink its bytes go to, or None to collect them as usual.

        A command that is refused already here gets a Sink that discards; its `refused` holds the error, answered when
        the command is complete. One that has to wait for room gets PENDING: its argument is not read meanwhile.
        """
        record = table.COMMANDS.get(bytes(argv[0]).lower()) if argv else None
        if record is None or record.open_stream is None or record.stream_arg != len(argv):
            return None
        try:
            self._gate(conn, record)
            return record.open_stream(self.context(conn), argv, nbytes)
        except CrowdedError as error:
            if self.server.spawn is None:
                return None  # nobody could wait: the argument is collected in memory
            self.server.spawn(functools.partial(self._placed, conn, record, argv, nbytes, error))
            return PENDING
        except CommandError as error:
            return _discarding(nbytes, error)

    async def _placed(
        self, conn: Any, record: table.Command, argv: list[bytes], nbytes: int, crowded: CrowdedError
    ) -> None:
        """Opens the stream once there is room."""
        open_stream, context = record.open_stream, self.context(conn)
        assert open_stream is not None

        def act() -> Any:
            if conn.closing:
                raise CommandError("ERR the connection has ended")
            return open_stream(context, argv, nbytes)

        try:
            sink = await self._with_room(act, crowded)
        except CommandError as error:
            sink = _discarding(nbytes, error)
        except Exception:  # as where no wait was needed: the argument is collected in memory
            log.exception("opening a stream failed")
            sink = None
        self._plane.place(conn, sink)

    def _admit(self, conn: Any, argv: list[Any]) -> table.Command:
        """The record of a command that may run now.

        Raises:
            CommandError: not logged in, unknown, wrong number of arguments, out of memory, or the log is broken.
        """
        if not conn.authenticated:
            # Before the login even the command's existence is not told.
            record = table.COMMANDS.get(bytes(argv[0]).lower())
            if record is None or not record.no_auth:
                raise AuthenticationError(errors.NOAUTH)
        record = table.find(argv)
        if record.write or record.denyoom:
            self._gate(conn, record)
        return record

    def _gate(self, conn: Any, record: table.Command) -> None:
        if not conn.authenticated and not record.no_auth:
            raise AuthenticationError(errors.NOAUTH)
        if record.logged and (errno := self.engine.keyspace.refuses):
            raise StorageError(errors.MISCONF_LOG.format(reason=os.strerror(errno)))
        if record.denyoom and self.server.maxmemory and not self.engine.keyspace.make_room():
            raise OutOfMemoryError

    def _execute(self, conn: Any, record: table.Command, argv: list[Any]) -> Any:
        started = time.perf_counter_ns()
        try:
            if record.stream_arg is not None and len(argv) > record.stream_arg:
                refused = getattr(argv[record.stream_arg], "refused", None)
                if refused is not None:
                    raise refused
            if record.fast is not None and (fast_id := self._fast_ids.get(record.name)) is not None:
                raw = self._plane.exec_fast(conn, fast_id, argv)
                if raw is not None:
                    return self._done(conn, record, argv, started, Raw(raw))
            value = record.handler(self.context(conn), argv)
        except CrowdedError as error:
            return self._await(conn, record, argv, started, self._handled(conn, record, argv, error))
        except CommandError as error:
            value = _refusal(error)
        except Exception as error:
            value = _failure(record, error)
        if type(value) is CoroutineType:
            return self._await(conn, record, argv, started, value)
        if type(value) is Later:
            value.finish = functools.partial(self._flushed, conn, record, argv, started)
            return value
        return self._done(conn, record, argv, started, value)

    def _flushed(self, conn: Any, record: table.Command, argv: list[Any], started: int, value: Any) -> Any:
        return self._done(conn, record, argv, started, _refusal(value) if isinstance(value, CommandError) else value)

    async def _await(
        self, conn: Any, record: table.Command, argv: list[Any], started: int, pending: Coroutine[Any, Any, Any]
    ) -> Any:
        try:
            try:
                value = await settled(await pending)
            except CrowdedError as error:  # where the entry had to be read first
                value = await self._handled(conn, record, argv, error)
        except CommandError as error:
            value = _refusal(error)
        except Exception as error:
            value = _failure(record, error)
        return self._done(conn, record, argv, started, value)

    async def _handled(self, conn: Any, record: table.Command, argv: list[Any], crowded: CrowdedError) -> Any:
        """Runs a write again once there is room. It has changed nothing so far."""
        try:
            return await self._with_room(functools.partial(record.handler, self.context(conn), argv), crowded)
        except Exception:  # whatever it was, and is still: a body that was not published must not stay open
            for arg in argv:
                if getattr(arg, "on_abort", None) is not None:
                    arg.on_abort(arg)
            raise

    async def _with_room(self, act: Callable[[], Any], crowded: CrowdedError) -> Any:
        """What a write gives once it has room.

        Raises:
            OutOfMemoryError: it did not get any in time.
        """
        with self.engine.claim() as claim:
            while True:
                claim.renew(crowded)
                await self._relieved(crowded)
                if claim.due(crowded):
                    try:
                        return await settled(act())
                    except CrowdedError as error:
                        crowded = error.with_traceback(None)  # else it would hold the frames that hold it
                if claim.over(crowded):
                    raise OutOfMemoryError(str(crowded))

    async def _relieved(self, crowded: CrowdedError) -> None:
        """One thread for each entry that is compacted, and one for what is being freed, however many writes wait."""
        server, entry = self.server, crowded.entry
        under_way = self._relieving.get(entry)
        if under_way is not None:
            await under_way.wait()
            return
        if server.new_event is not None:
            self._relieving[entry] = server.new_event()
        try:
            await server.to_waiting_thread(self.engine.relieve, crowded)
        finally:
            if server.new_event is not None:
                self._relieving.pop(entry).set()

    async def _held(self, conn: Any, record: table.Command, argv: list[Any]) -> Any:
        """Waits for the end of CLIENT PAUSE, then runs."""
        while self.server.holds(record.write):
            await self.server.wait_unpaused()
        return await settled(self._execute(conn, record, argv))

    def _done(self, conn: Any, record: table.Command, argv: list[Any], started: int, value: Any) -> Any:
        usec = (time.perf_counter_ns() - started) // 1000
        server = self.server
        server.commands_processed += 1
        stats = server.commands.get(record.name)
        if stats is None:
            stats = server.commands[record.name] = CommandStats()
        stats.calls += 1
        stats.usec += usec
        if type(value) is Err:
            stats.failed += 1
            self._count_error(value)
        if 0 <= server.slowlog.threshold_us <= usec and "skip_slowlog" not in record.flags:
            server.slowlog.note(argv, usec, conn.peer, conn.name or "")
        return self._reply(conn, value, record)

    def _rejected(self, argv: list[Any], error: CommandError) -> None:
        record = table.COMMANDS.get(bytes(argv[0]).lower())
        if record is not None:
            self.server.commands.setdefault(record.name, CommandStats()).rejected += 1
        self.server.error_counts[error.code] = self.server.error_counts.get(error.code, 0) + 1

    def _count_error(self, value: Any) -> None:
        code = value.value.split(b" ", 1)[0].decode("latin-1")
        self.server.error_counts[code] = self.server.error_counts.get(code, 0) + 1

    @staticmethod
    def _reply(conn: Any, value: Any, record: table.Command | None) -> Any:
        """Applies CLIENT REPLY: OFF drops every reply, SKIP the next one."""
        mode = conn.data.get("reply")
        if mode is None:
            return value
        if mode == "skip-next" and record is not None and record.name == "client|reply":
            conn.data["reply"] = "skip"
            return NO_REPLY
        if mode == "skip":
            conn.data["reply"] = None
            conn.fast = True
        return NO_REPLY


def _failure(record: table.Command, error: Exception) -> Err:
    """What a command that raised an error of no command's kind answers. A full disk is nobody's fault but its own."""
    if not isinstance(error, OSError):
        log.error("%s failed", record.name, exc_info=error)
        return _INTERNAL
    name, why = record.name.upper().replace("|", " "), error.strerror or str(error)
    log.error("%s failed: %s", name, why)
    return Err(f"ERR {name} failed: {why}")


def _discarding(nbytes: int, error: CommandError) -> Any:
    sink = Sink(None, 0, nbytes)
    sink.refused = error
    return sink


def _refusal(error: CommandError) -> Any:
    """The error reply; bytes of the request that were quoted in it go back as they came."""
    return Err(str(error).encode("utf-8", "surrogateescape"))
