"""A file that appears as a whole or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

__all__ = ["new_file"]


@contextlib.contextmanager
def new_file(path: Path, *, replace: bool = False) -> Iterator[Path]:
    """A name beside `path`, with the same suffix, to write to; it becomes `path` when the block ends, and is then on
    the medium.

    Args:
        replace: there may be a file of that name already.

    Raises:
        FileExistsError: there is one.
        OSError: it could not be written; the text names `path`.
    """
    if not replace and os.path.lexists(path):
        raise FileExistsError(f"{path} is there already (--replace writes over it)")
    temporary = path.with_name(f".{path.stem[:200]}.{os.getpid()}{path.suffix}")
    try:
        yield temporary
        _flush(temporary)
        if replace:
            os.replace(temporary, path)
        else:
            _give_name(temporary, path)
        _flush(path.parent)
    except OSError as error:
        text = str(error)
        if str(temporary) not in text:
            raise
        raise OSError(text.replace(str(temporary), str(path))) from error
    finally:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()


def _give_name(temporary: Path, path: Path) -> None:
    """Name a file as nothing else is named, not even for a moment."""
    try:
        os.link(temporary, path)
    except OSError:  # it is taken, or this file system has no second names
        if os.path.lexists(path):
            raise FileExistsError(f"{path} is there already (--replace writes over it)") from None
        os.rename(temporary, path)


def _flush(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
