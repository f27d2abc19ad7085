"""The lane's socket: a ticket of KV.PREFIX.LANE in, a descriptor of that entry's file out.

A client connects, sends the ticket and a line break, and gets one byte, ``+``, with one read-only descriptor beside it
(SCM_RIGHTS), or ``-`` and a reason. Either way the connection ends. Nothing is decided here: who may have what, the
command has settled before there was a ticket.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
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
                else:
                    self._clients += 1
                    got = _sent(sock)
                    if got is None or not _whole(got):
                        nursery.start_soon(self._welcome, sock, got or b"")
                    else:  # most clients send as they connect: they cost no task
                        with self._client(sock):
                            self._answer(sock, got)
                await trio.lowlevel.checkpoint()

    async def _welcome(self, sock: socket.socket, got: bytes) -> None:
        with self._client(sock), trio.move_on_after(_PATIENCE):
            while not _whole(got):
                await trio.lowlevel.wait_readable(sock)
                more = _sent(sock)
                if more == b"":
                    break
                got += more or b""
            self._answer(sock, got)

    @contextlib.contextmanager
    def _client(self, sock: socket.socket) -> Iterator[None]:
        """Until the end of its connection."""
        try:
            with sock:
                yield
        except OSError as error:
            log.debug("a client of the lane went away: %s", error)
        finally:
            self._clients -= 1

    def _answer(self, sock: socket.socket, got: bytes) -> None:
        """Nothing here waits: an answer fits in the buffer of a new connection."""
        try:
            fd = self._redeem(got.partition(b"\n")[0])
        except TicketError as error:
            sock.send(f"-{error}\n".encode())
            return
        except OSError as error:
            log.warning("an entry file could not be handed out: %s", error.strerror)
            sock.send(f"-the file cannot be opened: {error.strerror}\n".encode())
            return
        try:
            socket.send_fds(sock, [b"+"], [fd])
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


def _sent(sock: socket.socket) -> bytes | None:
    """What a client has sent since; None when that is nothing, and nothing at all when it went away."""
    try:
        return sock.recv(_LONGEST_TICKET + 1)
    except BlockingIOError:
        return None
    except OSError:
        return b""


def _whole(got: bytes) -> bool:
    """Whether no more need be waited for: a line, or more than any ticket has."""
    return b"\n" in got or len(got) > _LONGEST_TICKET
