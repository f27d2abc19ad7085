"""Entry files of a store that keeps nothing: in memory, or nameless on the disk."""

from __future__ import annotations

import errno
import os
import sys
import tempfile
from pathlib import Path

from pion._core import stream
from pion.store.copying import write_all


class MemoryFiles:
    """Entry files that no other process sees and that end with this one: memfd, elsewhere unlinked temporary files."""

    keeps = False

    def __init__(self) -> None:
        self.aside: list[str] = []
        self.leaving: dict[int, stream.Room] = {}
        self.left_behind: list[tuple[int, stream.Room]] = []

    @property
    def directory(self) -> int | None:
        """There is none."""
        return None

    def create(self, path: str, data: bytes, *, over: int = 0) -> int:
        """A new nameless file that holds `data`."""
        del over
        fd, _ = self.scratch(path, 0)
        try:
            write_all(fd, data)
        except OSError:
            os.close(fd)
            raise
        return fd

    def open(self, path: str) -> int:
        """Never needed: the descriptor is the only thing that holds the file, so it is never closed early."""
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)

    def discard(self, path: str, generation: int) -> None:
        """The file goes with its descriptor."""

    def remove(self, temporary: str) -> None:
        """The scratch file goes with its descriptor."""

    def adopt(self, temporary: str, path: str, generation: int) -> None:
        """The descriptor of the scratch file is all there is."""

    def scratch(self, path: str, generation: int) -> tuple[int, str]:
        """An empty nameless file of mode 0600: anybody could reopen one of memfd's own mode 0777."""
        if sys.platform == "linux":
            fd = os.memfd_create(path.rpartition("/")[2][:64], os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.fchmod(fd, 0o600)
            return _reopened(fd), ""
        fd, name = tempfile.mkstemp(prefix="pion-")
        os.unlink(name)
        return fd, ""

    def quarantine(self, path: str, generation: int) -> str:
        """There is nothing to keep it in."""
        return "(memory only: dropped)"

    def keep_tail(self, path: str, fd: int, offset: int, end: int) -> str:
        """There is nothing to keep it in."""
        return "(memory only: dropped)"

    def free_bytes(self) -> int:
        """Memory that is free without swapping, within the control group's limit."""
        return available_memory()

    def sync(self) -> None:
        """Nothing survives anyway."""

    def close(self) -> None:
        """Nothing is held."""


def _reopened(fd: int) -> int:
    """The same file, opened as any other is: of a descriptor as memfd_create gives it the kernel never grants the lease
    by which `lending` sees who else has it."""
    try:
        again = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    except OSError:  # no /proc
        return fd
    os.close(fd)
    return again


def available_memory() -> int:
    """Free memory as the kernel estimates it, cut to what a container may still use."""
    try:
        with open("/proc/meminfo", "rb") as info:
            fields = dict(line.split(b":", 1) for line in info)
        free = int(fields[b"MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            bound = Path(limit).read_text().strip()
            if bound != "max":
                free = min(free, int(bound) - int(Path(used).read_text()))
        except (OSError, ValueError):
            continue
    return max(free, 0)
