"""The server: builds the parts, listens, drives the plane, keeps the timers, ends in order.

Everything that awaits lives here. One task drives the plane (pion/_core/plane.pyx); a task per listener accepts and
hands the descriptor over; a task per slow command awaits its handler and completes the reply; timers do the rest. All
of it runs in one thread, the one that owns keyspace and plane.
"""

from __future__ import annotations

import errno
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from types import CoroutineType
from typing import Any

import trio

from pion import errors, limits
from pion._core.plane import PENDING, Conn, Plane
from pion.attention.choice import refusal
from pion.auth import Authenticator
from pion.commands import Dispatcher, ServerState, table
from pion.commands.commits import Later
from pion.commands.computing import Computing
from pion.config import Options
from pion.net.fastlane import FastLane, open_listeners
from pion.net.lane import Lane
from pion.net.listeners import address_text, open_tcp, open_unix, raise_descriptor_limit
from pion.store.engine import Engine
from pion.wire.resp import Err

log = logging.getLogger("pion.net")

TICK = 0.1  # seconds: expiry, send timeouts, samples
EXPIRE_BUDGET_US = 1000  # of each tick, at most
SLICE = 4 << 20  # bytes a large value may send or receive per turn: with 1 MiB the turns themselves cost a fifth
DRAIN = 5.0  # seconds a graceful end waits for replies that are due
WAITERS = 64  # entries at a time for whose compaction writes wait
RESERVED_FDS = 256  # descriptors for entry files (a quarter of all), the log and listeners beside the clients


class Server:
    """One running server.

    Args:
        options: see `pion.config.Options`.
    """

    def __init__(self, options: Options) -> None:
        self.options = options
        self.stopping = trio.Event()
        self.state = ServerState(maxclients=options.maxclients)
        self.listeners: list[tuple[socket.socket, str]] = []
        self.engine: Engine
        self.plane: Plane
        self.dispatcher: Dispatcher
        self._nursery: trio.Nursery
        self._accepting: list[trio.CancelScope] = []  # one a listener
        self._urgent = False
        self._lane: Lane | None = None
        self._binary: list[tuple[socket.socket, str]] = []

    # --- start -----------------------------------------------------------------------------------------------------

    async def run(self, task_status: trio.TaskStatus[int]) -> None:
        """Serves until `stopping` is set; reports the bound TCP port (0 without one) once connections are accepted."""
        options = self.options
        if (why := refusal(options.attention_mode)) is not None:
            raise errors.StartupError(f"--attention {options.attention_mode}: {why}")
        sys.setswitchinterval(0.0005)  # one busy Python handler must not keep the plane waiting for 5 ms
        fds = raise_descriptor_limit(options.maxclients + limits.DEFAULT_MAX_SESSIONS)
        reserved = max(RESERVED_FDS, fds // 4 + 96)
        if fds < options.maxclients + reserved:
            self.state.maxclients = max(1, fds - reserved)
            log.warning("at most %d clients: the descriptor limit is %d", self.state.maxclients, fds)
        port = self._listen()
        try:
            self.engine = await trio.to_thread.run_sync(self._open_engine)
            if self.engine.keyspace_store is not None:
                self.engine.keyspace_store.adopt()
            self._connect_parts(port)
            try:
                self._open_lane()
                self._open_binary_lane(port)
                await self._serve(port, task_status)
            finally:
                if self._lane is not None:
                    self._lane.close()
                if self.state.computing is not None:
                    with trio.CancelScope(shield=True):  # behind it no reply is on its way to the plane any more
                        await trio.to_thread.run_sync(self.state.computing.close)
                self.plane.close()
        finally:
            self._close_listeners()
            if hasattr(self, "engine"):
                with trio.CancelScope(shield=True):
                    await trio.to_thread.run_sync(self.engine.close)

    def _listen(self) -> int:
        options = self.options
        port = 0
        if options.port >= 0:
            for sock in open_tcp(options.bind, options.port):
                self.listeners.append((sock, address_text(sock.getsockname())))
                port = sock.getsockname()[1]
        if options.unixsocket:
            self.listeners.append((open_unix(options.unixsocket, options.unixsocketperm), options.unixsocket))
        if not self.listeners:
            raise errors.StartupError("nothing to listen on: give a port or --unixsocket")
        return port

    def _open_lane(self) -> None:
        """Where clients of this machine get entry files. Without it they are sent the bytes."""
        wanted = self.options.lane
        if wanted == "off" or not self.options.kvcache:
            return
        try:
            self._lane = Lane(wanted, self.engine.root, self.engine.redeem)
        except (errors.StartupError, OSError) as error:
            if wanted:
                raise errors.StartupError(f"--lane: {error}") from error
            log.warning("no lane for clients of this machine, they are sent the bytes: %s", error)
            self.state.no_lane = f"{error}; as with --lane off"
            return
        self.state.lane = self._lane.path

    def _open_binary_lane(self, port: int) -> None:
        self._binary = open_listeners(self.options, port)
        if self._binary:
            self.state.binary.port = self._binary[0][0].getsockname()[1]

    def _close_listeners(self) -> None:
        for sock, name in [*self.listeners, *self._binary]:
            if sock.family == socket.AF_UNIX and sock.fileno() >= 0:
                try:
                    os.unlink(name)
                except FileNotFoundError:
                    log.debug("%s was removed by somebody else", name)
            sock.close()

    def _open_engine(self) -> Engine:
        options = self.options
        return Engine(
            None if options.memory_only else options.dir,
            memory_only=options.memory_only,
            kvcache=options.kvcache,
            max_sessions=options.max_sessions,
            max_bytes=options.max_bytes,
            appendfsync=options.appendfsync,
            wal=options.wal,
            ns_prefix=options.ns_prefix,
            databases=options.databases,
            ticker=False,
        )

    def _connect_parts(self, port: int) -> None:
        options, state = self.options, self.state
        auth = Authenticator(options.requirepass or None)
        self.engine.deferred_sync = True  # handlers that must be durable await one commit for all of them
        self.engine.deferred_room = True  # nothing is compacted in this thread
        self.dispatcher = Dispatcher(self.engine, options, auth, state)
        self.plane = Plane(
            self.engine.keyspace,
            self._handle,
            self.dispatcher.stream_open,
            fast_table=self.dispatcher.fast_table(),
            streams=stream_table(),
            movers=options.workers,
            slice_bytes=SLICE,
            limits=plane_limits(),
        )
        self.dispatcher.plane = self.plane
        state.port = port
        state.to_thread = trio.to_thread.run_sync
        state.to_waiting_thread = partial(trio.to_thread.run_sync, limiter=trio.CapacityLimiter(WAITERS))
        state.computing = Computing(partial(_soon, trio.lowlevel.current_trio_token()), trio.Event)
        state.new_event = trio.Event
        state.shut_down = self._shut_down

    # --- running -----------------------------------------------------------------------------------------------------

    async def _serve(self, port: int, task_status: trio.TaskStatus[int]) -> None:
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            self.state.spawn = nursery.start_soon
            nursery.start_soon(self._drive)
            nursery.start_soon(self._tick)
            nursery.start_soon(self._each_second)
            if self._lane is not None:
                nursery.start_soon(self._lane.serve)
            if trio.lowlevel.current_root_task() is not None and _in_main_thread():
                await nursery.start(self._watch_signals)
            for sock, name in self.listeners:
                nursery.start_soon(self._accept, sock, name, self._welcome)
                # In one write with its end: unbuffered, print would let a line of the log come between.
                print(f"Ready to accept connections on {name}\n", end="", flush=True)
            if self._binary:
                welcome = FastLane(self.plane, self.dispatcher, nursery.start_soon).welcome
                for sock, name in self._binary:
                    nursery.start_soon(self._accept, sock, name, welcome)
                    print(f"Ready to accept binary requests on {name}\n", end="", flush=True)
            task_status.started(port)
            await self.stopping.wait()
            for scope in self._accepting:
                scope.cancel()
            for sock, _ in [*self.listeners, *self._binary]:
                if sock.family != socket.AF_UNIX:
                    sock.close()
            await self._drain()
            nursery.cancel_scope.cancel()

    async def _drive(self) -> None:
        plane = self.plane
        while True:
            if plane.batch():
                await trio.lowlevel.checkpoint()
            else:
                await trio.lowlevel.wait_readable(plane.fd)

    def _handle(self, conn: Conn, argv: list[Any]) -> Any:
        value = self.dispatcher(conn, argv)
        if type(value) is CoroutineType:
            self._nursery.start_soon(self._finish, conn, value)
            return PENDING
        if type(value) is Later:
            value.deliver = partial(self.plane.resume, conn)
            return PENDING
        return value

    async def _finish(self, conn: Conn, work: Coroutine[Any, Any, Any]) -> None:
        try:
            value = await work
        except Exception:  # a fault of one command ends neither its connection nor the server
            log.exception("a command failed")
            value = Err(errors.INTERNAL)
        self.plane.resume(conn, value)

    async def _accept(
        self, listener: socket.socket, name: str, welcome: Callable[[socket.socket, Any, str], None]
    ) -> None:
        with trio.CancelScope() as scope:
            self._accepting.append(scope)
            while True:
                try:
                    sock, address = listener.accept()
                except BlockingIOError:
                    await trio.lowlevel.wait_readable(listener)
                    continue
                except ConnectionAbortedError:
                    continue
                except OSError as error:
                    if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                        raise
                    log.warning("cannot accept a connection: %s", error.strerror)
                    await trio.sleep(0.1)
                    continue
                welcome(sock, address, name)
                await trio.lowlevel.checkpoint()

    def _welcome(self, sock: socket.socket, address: Any, name: str) -> None:
        unix = sock.family == socket.AF_UNIX
        if self.plane.connected >= self.state.maxclients:
            self.plane.rejected += 1
            sock.setblocking(False)
            try:
                sock.send(b"-" + errors.MAXCLIENTS.encode() + b"\r\n")
            except OSError as error:
                log.debug("a refused client is gone already: %s", error)
            sock.close()
            return
        peer = f"{name}:0" if unix else address_text(address)
        local = name if unix else address_text(sock.getsockname())
        try:
            conn = self.plane.add(sock.detach(), unix=unix, peer=peer, local=local)
        except OSError as error:
            log.warning("a connection could not be served: %s", error)
            return
        self.dispatcher.connected(conn)

    # --- timers ------------------------------------------------------------------------------------------------------

    async def _tick(self) -> None:
        due = trio.current_time()
        while True:
            # A late tick is not made up for: after a long pause there would be a burst of them.
            due = max(due + TICK, trio.current_time())
            await trio.sleep_until(due)
            self.engine.keyspace.expire_cycle(EXPIRE_BUDGET_US)
            if self.engine.keyspace_store is not None:
                self.engine.keyspace_store.tick()
            self.plane.tick()
            self.state.tick()
            if self.options.timeout:
                self._close_idle(self.options.timeout)

    def _close_idle(self, seconds: int) -> None:
        now = time.monotonic()
        for conn in self.plane.connections:
            if now - conn.last_active > seconds and not conn.pending and not conn.output_bytes:
                self.plane.close(conn)

    async def _each_second(self) -> None:
        while True:
            await trio.sleep(1.0)
            self.engine.fsync_tick()  # starts what is due and does not wait for it

    # --- the end -----------------------------------------------------------------------------------------------------

    async def _watch_signals(self, task_status: trio.TaskStatus[None]) -> None:
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            task_status.started()
            async for number in signals:
                log.info(
                    "%s: %s", signal.Signals(number).name, "at once" if self.stopping.is_set() else "shutting down"
                )
                self._urgent = self.stopping.is_set()
                self.stopping.set()

    def _shut_down(self, save: bool) -> None:
        """SHUTDOWN; everything acknowledged is kept with or without `save`."""
        del save
        self.stopping.set()

    async def _drain(self) -> None:
        """Replies that are due still leave; who waits for nothing is sent away at once."""
        end = trio.current_time() + DRAIN
        while self.plane.connected and trio.current_time() < end and not self._urgent:
            for conn in self.plane.connections:
                if not conn.pending:
                    self.plane.close(conn)
            await trio.sleep(0.01)


def plane_limits() -> dict[str, Any]:
    """The bounds of `pion.limits` under the plane's names."""
    return {
        "max_args": limits.MAX_ARGS,
        "max_bulk": limits.MAX_BULK,
        "max_inline": limits.MAX_INLINE,
        "query_buffer": limits.QUERY_BUFFER,
        "query_buffer_total": limits.QUERY_BUFFER_TOTAL,
        "stream_min": limits.STREAM_MIN,
        "preauth_output": limits.PREAUTH_MAX_OUTPUT,
        "max_output": limits.MAX_OUTPUT,
        "max_output_slots": limits.MAX_OUTPUT_SLOTS,
        "output_total": limits.OUTPUT_TOTAL,
        "send_timeout": limits.SEND_TIMEOUT,
    }


def stream_table() -> list[tuple[bytes, int]]:
    """`(name, argument index)` of every argument that may be received straight into a file."""
    return [
        (record.name.encode(), record.stream_arg)
        for record in table.walk()
        if record.stream_arg is not None and record.open_stream is not None
    ]


def _soon(token: trio.lowlevel.TrioToken, fn: Any, *args: Any) -> None:
    """Calls in the thread of trio; nothing when it has ended meanwhile, and with it everybody who waits."""
    with suppress(trio.RunFinishedError):
        token.run_sync_soon(fn, *args)


def _in_main_thread() -> bool:
    import threading

    return threading.current_thread() is threading.main_thread()


async def serve(options: Options, *, task_status: trio.TaskStatus[int] = trio.TASK_STATUS_IGNORED) -> None:
    """Runs one server until SIGTERM, SIGINT or SHUTDOWN.

    Args:
        options: see `pion.config.Options`.
        task_status: `started(port)` is called once connections are accepted.

    Raises:
        StartupError: an address, the data directory or the log cannot be used.
    """
    await Server(options).run(task_status)
