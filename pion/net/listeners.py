"""Sockets the server listens on, and the descriptor limit that bounds how many clients it can take."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import socket
import stat
from collections.abc import Iterable

from pion.errors import StartupError

BACKLOG = 511  # Redis's tcp-backlog


def raise_descriptor_limit(wanted: int) -> int:
    """Lifts the soft limit on open descriptors towards `wanted`, as far as the hard limit lets us.

    Returns:
        The limit in force afterwards.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    ceiling = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < ceiling:
        # macOS refuses values above its own bound (OPEN_MAX) even below the hard limit.
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (ceiling, hard))
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return wanted if soft == resource.RLIM_INFINITY else soft


def open_tcp(addresses: Iterable[str], port: int) -> list[socket.socket]:
    """One listening socket per address. With port 0 the first one's port serves for all.

    Raises:
        StartupError: an address cannot be bound.
    """
    sockets: list[socket.socket] = []
    try:
        for address in addresses:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            sock = socket.socket(family, socket.SOCK_STREAM)
            sockets.append(sock)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            sock.bind((address, port))
            sock.listen(BACKLOG)
            sock.setblocking(False)
            port = sock.getsockname()[1]
    except OSError as error:
        for sock in sockets:
            sock.close()
        if error.errno == errno.EADDRINUSE:
            raise StartupError(f"cannot bind port {port} (already in use?)") from None
        raise StartupError(f"cannot listen on {address}:{port}: {os.strerror(error.errno or 0)}") from None
    return sockets


def open_unix(path: str, mode: int) -> socket.socket:
    """A listening Unix socket. A stale socket file of a dead server is replaced, anything else is left alone.

    Raises:
        StartupError: the path is taken or cannot be bound.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISSOCK(os.lstat(path).st_mode):
                raise StartupError(f"{path} exists and is not a socket")
            if _answers(path):
                raise StartupError(f"another server listens on {path}")
            os.unlink(path)
        old = os.umask(0o777 & ~mode)
        try:
            sock.bind(path)
        finally:
            os.umask(old)
        sock.listen(BACKLOG)
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        raise StartupError(f"cannot listen on {path}: {error.strerror or error}") from None
    except StartupError:
        sock.close()
        raise
    return sock


def _answers(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(path) not in (errno.ECONNREFUSED, errno.ENOENT)


def address_text(address: object) -> str:
    """`127.0.0.1:1974`, `[::1]:1974`, or the path of a Unix socket, as CLIENT LIST shows it."""
    if isinstance(address, tuple):
        host, port = str(address[0]), address[1]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    if isinstance(address, bytes):
        return os.fsdecode(address)
    return str(address)
