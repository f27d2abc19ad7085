"""Bytes into files and from one file to another, whole or with an error."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Final

from pion import limits
from pion._core import vstore

_PIECE: Final = 1 * limits.MIB


def write_all(fd: int, data: bytes | memoryview, at: int = 0) -> None:
    """Write at an offset until everything is out. Raises OSError."""
    view = memoryview(data)
    while view:
        done = os.pwrite(fd, view, at)
        at, view = at + done, view[done:]


def read_exactly(fd: int, nbytes: int, offset: int) -> bytes:
    """Bytes of a file. Raises OSError when they are not all there."""
    data = os.pread(fd, nbytes, offset)
    while len(data) < nbytes:
        more = os.pread(fd, nbytes - len(data), offset + len(data))
        if not more:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        data += more
    return data


def move_within(fd: int, source: int, nbytes: int, target: int) -> None:
    """Copy bytes of a file to another place in it, which does not overlap. Raises OSError."""
    for at in range(0, nbytes, _PIECE):
        write_all(fd, read_exactly(fd, min(_PIECE, nbytes - at), source + at), target + at)


def copy_file(fd: int, size: int, path: Path, flags: int, *, pad: bool = False) -> None:
    """Copy the first bytes of an open file into a new one, and flush it.

    Args:
        size: how many; a source that ends before is copied to its end.
        flags: to open the target with, besides O_WRONLY and O_CREAT.
        pad: give the target this size even so.

    Raises:
        OSError: something could not be read or written.
    """
    out = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | flags, 0o600)
    try:
        at = 0
        while at < size and (piece := os.pread(fd, min(_PIECE, size - at), at)):
            write_all(out, piece, at)
            at += len(piece)
        if pad and at < size:
            os.ftruncate(out, size)
        vstore.flush(out)
    finally:
        os.close(out)
