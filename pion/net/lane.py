"""The lane's socket: a ticket of KV.PREFIX.LANE in, a descriptor of that entry's file out.

A client connects, sends the ticket and a line break, and gets one byte, ``+``, with one read-only descriptor beside it
(SCM_RIGHTS), or ``-`` and a reason. Either way the connection ends. Nothing is decided here: who may have what, the
command has settled before there was a ticket.
"""

from __future__ import annotations

import array
import contextlib
import errno
import logging
import os
import shutil
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

import trio

from pion import limits
from pion.errors import StartupError, TicketError
from pion.net.listeners import open_unix

log = logging.getLogger("pion.net")

NAME: Final = limits.LANE_SOCKET
_LONGEST_PATH: Final = 100  # of a Unix socket: 107 bytes on Linux, 103 on macOS
_SHORT: Final = ("/tmp", "/var/tmp", "/dev/shm")  # tried where TMPDIR is too long for a socket
_LONGEST_TICKET: Final = 64
_PATIENCE: Final = 5.0  # seconds that a client may take
_MODE: Final = 0o700  # of the socket: processes of the same user


class Lane:
    """The listening socket.

    Args:
        wanted: a path, or empty for the data directory (or a directory of mode 0700 of its own, where there is none or
            its path is too long: below the temporary directory, or where a path is short).
        root: the data directory.
        redeem: ticket to descriptor.

    Raises:
        StartupError: the socket cannot be made.
    """

    def __init__(self, wanted: str, root: Path | None, redeem: Callable[[bytes], int]) -> None:
        self._redeem = redeem
        self._folder = ""
        self._clients = 0
        path = wanted or ("" if root is None else str(root.absolute() / NAME))
        if not wanted and (not path or len(os.fsencode(path)) > _LONGEST_PATH):
            self._folder = _short_folder()
            path = f"{self._folder}/{NAME}"
        self.path = os.path.abspath(path)
        try:
            self._listener = open_unix(self.path, _MODE)
        except StartupError:
            self._remove_folder()
            raise

    def close(self) -> None:
        """Remove the socket."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)
        self._listener.close()
        self._remove_folder()

    def _remove_folder(self) -> None:
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)

    async def serve(self) -> None:
        """Accept clients until cancelled."""
        async with trio.open_nursery() as nursery:
            while True:
                await trio.lowlevel.wait_readable(self._listener)
                try:
                    sock, _ = self._listener.accept()
                except (BlockingIOError, ConnectionAbortedError):
                    continue
                except OSError as error:
                    if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                        raise
                    log.warning("the lane cannot accept a connection: %s", error.strerror)
                    await trio.sleep(0.1)
                    continue
                sock.setblocking(False)
                if self._clients >= limits.LANE_CLIENTS:
                    sock.close()
                    await trio.lowlevel.checkpoint()
                    continue
                self._clients += 1
                nursery.start_soon(self._welcome, trio.socket.from_stdlib_socket(sock))

    async def _welcome(self, sock: trio.socket.SocketType) -> None:
        try:
            with sock, trio.move_on_after(_PATIENCE):
                await self._answer(sock, await _line(sock))
        except OSError as error:
            log.debug("a client of the lane went away: %s", error)
        finally:
            self._clients -= 1

    async def _answer(self, sock: trio.socket.SocketType, ticket: bytes) -> None:
        try:
            fd = self._redeem(ticket)
        except TicketError as error:
            await sock.send(f"-{error}\n".encode())
            return
        except OSError as error:
            log.warning("an entry file could not be handed out: %s", error.strerror)
            await sock.send(f"-the file cannot be opened: {error.strerror}\n".encode())
            return
        try:
            await sock.sendmsg([b"+"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))])
        finally:
            os.close(fd)


def _short_folder() -> str:
    """A new directory of mode 0700 in which a socket can stand. Raises StartupError."""
    why = ""
    for above in dict.fromkeys([tempfile.gettempdir(), os.environ.get("XDG_RUNTIME_DIR", ""), *_SHORT]):
        if not above:
            continue
        if len(os.fsencode(f"{above}/pion-lane-12345678/{NAME}")) > _LONGEST_PATH:
            why += f"; {above} is too long for the path of a socket"
            continue
        try:
            return tempfile.mkdtemp(prefix="pion-lane-", dir=above)
        except OSError as error:
            why += f"; {above}: {error.strerror}"
    raise StartupError(f"no directory for its socket{why} (--lane PATH names one)")


async def _line(sock: trio.socket.SocketType) -> bytes:
    """What the client sent before its line break; something that is no ticket, when it sent anything else."""
    got = b""
    while b"\n" not in got and len(got) <= _LONGEST_TICKET:
        more = await sock.recv(_LONGEST_TICKET + 1 - len(got))
        if not more:
            return b""
        got += more
    return got.partition(b"\n")[0]
