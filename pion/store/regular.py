"""Files that may not be what they should: opened without waiting, and watched."""

from __future__ import annotations

import errno
import os
import stat
from typing import Final

_WATCHED: Final = 64  # bytes before the end


def open_regular(path: str | os.PathLike[str], flags: int = os.O_RDONLY, *, follow: bool = False) -> int:
    """A descriptor of a regular file: opening a pipe for reading would wait for ever, a link leads elsewhere.

    Raises:
        OSError: there is no such file, it may not be opened, or something else has its name.
    """
    flags |= os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    try:
        fd = os.open(path, flags)
    except OSError as error:
        if error.errno == errno.ELOOP and not follow:
            raise OSError(errno.ELOOP, "a symbolic link, not a file", os.fspath(path)) from error
        raise
    mode = os.fstat(fd).st_mode
    if not stat.S_ISREG(mode):
        os.close(fd)
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
        raise OSError(errno.EINVAL, "a pipe or device, not a file", os.fspath(path))
    return fd


class Watch:
    """Notices when somebody cuts or removes a file that this process only ever appends to."""

    def __init__(self) -> None:
        self._which = self._at = 0
        self._seen = b""

    def look(self, fd: int, size: int, which: int) -> str:
        """What happened since the last look, "" = nothing.

        Args:
            size: bytes that should be there.
            which: another number for each file that takes the place of one before it; inode numbers come back.
        """
        info = os.fstat(fd)
        if info.st_nlink == 0:
            return "was removed"
        if info.st_size < size:
            return f"was cut to {info.st_size} bytes"
        # what was written behind a cut leaves a hole in front of it
        if which == self._which and os.pread(fd, len(self._seen), self._at) != self._seen:
            return "was cut or overwritten"
        self._which, self._at = which, max(0, size - _WATCHED)
        self._seen = os.pread(fd, size - self._at, self._at)
        return ""
