"""Where entry files come from and where they go: a data directory, or memory.

Both kinds offer the same methods. Paths are relative to the directory, as `layout.entry_path` makes them. Nothing here
is thread-safe by itself; the store calls it with its lock held.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Protocol

from pion import limits
from pion._core import framing, stream, vstore
from pion.errors import StartupError
from pion.store import layout
from pion.store.copying import write_all

log = logging.getLogger("pion.store")

LOCK: Final = "pion.lock"
TRASH: Final = "kv/trash"
QUARANTINE: Final = "quarantine"
EXPORT: Final = "export"  # exports.py
TAIL_KEPT: Final = 16 * limits.MIB  # of a cut-off tail


class Files(Protocol):
    """Creates, opens and removes entry files."""

    keeps: bool  # files survive this process
    leaving: dict[int, stream.Room]  # of removed files, by generation, until the store asks
    left_behind: list[tuple[int, stream.Room]]  # bytes of files that the last process was removing
    aside: list[str]  # what was moved or copied into the quarantine

    @property
    def directory(self) -> int | None: ...
    def create(self, path: str, data: bytes, *, over: int = 0) -> int: ...
    def open(self, path: str) -> int: ...
    def discard(self, path: str, generation: int) -> None: ...
    def adopt(self, temporary: str, path: str, generation: int) -> None: ...
    def scratch(self, path: str, generation: int) -> tuple[int, str]: ...
    def remove(self, temporary: str) -> None: ...
    def quarantine(self, path: str, generation: int) -> str: ...
    def keep_tail(self, path: str, fd: int, offset: int, end: int) -> str: ...
    def free_bytes(self) -> int: ...
    def sync(self) -> None: ...
    def close(self) -> None: ...


class DiskFiles:
    """Entry files below a data directory, which this object locks.

    Raises:
        StartupError: another process has the directory, or it cannot be made.
    """

    keeps = True

    def __init__(self, root: Path) -> None:
        self.root = root
        self._stale = {"", "kv", f"kv/{layout.TENANT}"}  # directories whose entries changed since the last sync
        self._made: set[str] = set()
        self.leaving: dict[int, stream.Room] = {}
        self.left_behind: list[tuple[int, stream.Room]] = []  # bytes of files that the last process was removing
        self.aside: list[str] = []  # what this process moved or copied into the quarantine
        if root.exists() and not root.is_dir():
            raise StartupError(f"data directory {root}: there is a file of that name")
        try:
            root.mkdir(parents=True, exist_ok=True)
            self._lock = self._take_lock()
            os.utime(self._lock)
            # the file system's own clock, which runs a few ms behind time.time()
            self.since = os.fstat(self._lock).st_mtime
            self._dir = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            self._lock_directory()
            self._make_folders()
        except OSError as error:
            raise StartupError(f"data directory {error.filename or root}: {error.strerror}") from error
        self._empty_trash()

    @property
    def directory(self) -> int | None:
        """Descriptor of the data directory."""
        return self._dir

    def entry_files(self) -> Iterator[str]:
        """Paths of whatever stands where entries do."""
        for folder, folders, names in os.walk(self.root / "kv" / layout.TENANT):
            base = os.path.relpath(folder, self.root)
            for name in names + [name for name in folders if name.endswith(layout.SUFFIX)]:
                yield f"{base}/{name}"

    def size(self, path: str) -> int:
        """Bytes of a file. Raises OSError."""
        return os.stat(path, dir_fd=self._dir, follow_symlinks=False).st_size

    def _make_folders(self) -> None:
        """The directories of the layout; a file of such a name is moved aside."""
        fanout = [f"kv/{layout.TENANT}/{number:02x}" for number in range(layout.FANOUT)]
        for name in (QUARANTINE, "kv", TRASH, f"kv/{layout.TENANT}", *fanout):
            path = self.root / name
            if os.path.lexists(path) and not path.is_dir():
                aside = f"{QUARANTINE}.unused" if name == QUARANTINE else ""
                if aside:
                    os.rename(path, self.root / aside)
                    self.aside.append(aside)
                else:
                    aside = self.quarantine(name, 0)
                log.error("%s is no directory: it was moved to %s", path, aside)
            if name not in fanout:
                path.mkdir(exist_ok=True)

    def _take_lock(self) -> int:
        if (self.root / LOCK).is_dir():
            os.rename(self.root / LOCK, self.root / f"{LOCK}.unused")
            log.error("%s was a directory: it was moved to %s.unused", self.root / LOCK, LOCK)
        fd = os.open(self.root / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            pid = os.pread(fd, 32, 0).decode("ascii", "replace").strip()
            shared = _may_read_along(fd)
            os.close(fd)
            if error.errno not in (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES):
                raise
            if shared:
                raise StartupError(f"data directory {self.root} is being verified by pion check") from None
            raise StartupError(f"data directory {self.root} is in use by the process {pid or 'unknown'}") from None
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        return fd

    def _lock_directory(self) -> None:
        """A lock on the directory itself: somebody may have removed the lock file of a server that runs."""
        try:
            fcntl.flock(self._dir, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise StartupError(
                f"data directory {self.root} is in use by another process, whose {LOCK} was removed"
            ) from None
        except OSError as error:  # some network file systems lock files only
            log.info("%s itself cannot be locked: %s", self.root, error.strerror)

    def _empty_trash(self) -> None:
        for item in os.scandir(self.root / TRASH):
            room = stream.Room()
            with contextlib.suppress(OSError):
                self.left_behind.append((item.stat(follow_symlinks=False).st_blocks * 512, room))
            stream.unlink_later(item.path, room)

    def _directory(self, path: str) -> str:
        parent = path.rpartition("/")[0]
        if parent not in self._made:
            os.makedirs(self.root / parent, exist_ok=True)
            self._made.add(parent)
            self._stale.update((parent, parent.rpartition("/")[0]))
        self._stale.add(parent)
        return parent

    def create(self, path: str, data: bytes, *, over: int = 0) -> int:
        """A new file that holds `data`, open for reading and writing; it is there as a whole or not at all.

        Args:
            over: generation of the file of that path that is replaced. Without it a file that is there has nothing to
                do with us (the index does not know it): it is moved to the quarantine.
        """
        self._directory(path)
        temporary = f"{path}.new"
        fd = self._open_new(temporary)
        try:
            write_all(fd, data)
            if over:
                vstore.flush(fd)  # else a power cut could leave the name of the old file on an empty new one
                self.adopt(temporary, path, over)
            else:
                if self._exists(path):
                    log.warning("%s was moved to %s: the index does not know it", path, self.quarantine(path, 0))
                os.rename(temporary, path, src_dir_fd=self._dir, dst_dir_fd=self._dir)
        except OSError:
            os.close(fd)
            self._unlink(temporary)
            raise
        return fd

    def _open(self, path: str, flags: int) -> int:
        return os.open(path, flags | os.O_CLOEXEC, 0o600, dir_fd=self._dir)

    def _exists(self, path: str) -> bool:
        try:
            os.stat(path, dir_fd=self._dir, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    def _unlink(self, path: str) -> None:
        try:
            os.unlink(path, dir_fd=self._dir)
        except FileNotFoundError:
            return

    def _open_new(self, path: str) -> int:
        """An empty file in a directory that `_directory` has made, or makes again."""
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC
        try:
            return self._open(path, flags)
        except FileNotFoundError:
            self._folder(path.rpartition("/")[0])
            return self._open(path, flags)

    def _folder(self, name: str) -> None:
        """Make a directory of the layout again, which somebody may have removed under the running server."""
        above = name.rpartition("/")[0]
        if above:
            self._folder(above)
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, dir_fd=self._dir)
            log.error("%s was removed under the running server: it is made again", self.root / name)
            self._stale.update((above, name))

    def _move(self, path: str, target: str) -> None:
        """Rename into the trash or the quarantine. FileNotFoundError: there is no such file, not: no such directory."""
        try:
            os.rename(path, target, src_dir_fd=self._dir, dst_dir_fd=self._dir)
        except FileNotFoundError:
            if not self._exists(path):
                raise
            self._folder(target.rpartition("/")[0])
            os.rename(path, target, src_dir_fd=self._dir, dst_dir_fd=self._dir)

    def open(self, path: str) -> int:
        """An existing file, for reading and appending."""
        return self._open(path, os.O_RDWR | os.O_NOFOLLOW)

    def discard(self, path: str, generation: int) -> None:
        """Take the file out of the store at once and free its blocks in the background."""
        trash = f"{TRASH}/{generation:016x}"
        try:
            self._move(path, trash)
        except FileNotFoundError:
            return
        self._stale.add(path.rpartition("/")[0])
        self._leave(trash, generation)

    def _leave(self, trash: str, generation: int) -> None:
        room = self.leaving[generation] = stream.Room()
        stream.unlink_later(self.root / trash, room)

    def scratch(self, path: str, generation: int) -> tuple[int, str]:
        """An empty file beside `path` for `adopt`, and its name, which no other generation has: what has this path now
        may be compacted while a compaction of what had it before is not over."""
        self._directory(path)
        temporary = f"{path.removesuffix(layout.SUFFIX)}.{generation:016x}{layout.SUFFIX}.compact"
        return self._open_new(temporary), temporary

    def remove(self, temporary: str) -> None:
        """Delete a scratch file."""
        self._unlink(temporary)

    def adopt(self, temporary: str, path: str, generation: int) -> None:
        """Put a scratch file in the place of `path`; the blocks of the old one are freed in the background.

        A second name keeps the old file alive over the rename, which would otherwise free its blocks in this thread.
        Without it (no hard links here, or no old file) the rename alone does.
        """
        trash = f"{TRASH}/{generation:016x}"
        with contextlib.suppress(OSError):
            os.link(path, trash, src_dir_fd=self._dir, dst_dir_fd=self._dir)
        os.rename(temporary, path, src_dir_fd=self._dir, dst_dir_fd=self._dir)
        self._stale.add(path.rpartition("/")[0])
        self._leave(trash, generation)

    def quarantine(self, path: str, generation: int) -> str:
        """Move a file aside, never over another one; returns its new path."""
        base = path.rpartition("/")[2]
        target, n = f"{QUARANTINE}/{base}.{generation:016x}", 0
        while self._exists(target):
            n += 1
            target = f"{QUARANTINE}/{base}.{generation:016x}.{n}"
        self._move(path, target)
        self._stale.update((path.rpartition("/")[0], QUARANTINE))
        self.aside.append(target)
        return str(self.root / target)

    def keep_tail(self, path: str, fd: int, offset: int, end: int) -> str:
        """Copy what is about to be cut off (at most 16 MiB of it) into the quarantine; returns the copy's path.

        A copy that cannot be made is no reason to lose what is whole: the answer then says so instead.
        """
        base = path.rpartition("/")[2]
        target, n = f"{QUARANTINE}/{base}.tail-{offset}", 0
        while self._exists(target):
            n += 1
            target = f"{QUARANTINE}/{base}.tail-{offset}.{n}"
        try:
            self._folder(QUARANTINE)
            out = self._open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            try:
                write_all(out, os.pread(fd, min(end - offset, TAIL_KEPT), offset))
            finally:
                os.close(out)
        except OSError as error:
            return f"(no copy: {error.strerror})"
        self.aside.append(target)
        return str(self.root / target)

    def free_bytes(self) -> int:
        """Bytes an unprivileged process may still write."""
        info = os.statvfs(self.root)
        return info.f_bavail * info.f_frsize

    def sync(self) -> None:
        """Make created, renamed and removed names durable.

        Raises:
            OSError: they are not, or the data directory itself was removed.
        """
        if os.fstat(self._dir).st_nlink == 0:
            raise FileNotFoundError(errno.ENOENT, "the data directory was removed", os.fspath(self.root))
        stale, self._stale = self._stale, set()
        try:
            for name in sorted(stale):
                try:
                    fd = os.open(name or ".", os.O_RDONLY | os.O_DIRECTORY, dir_fd=self._dir)
                except FileNotFoundError:  # removed under the running server, with all names in it
                    continue
                try:
                    os.fsync(fd)
                finally:
                    os.close(fd)
        except OSError:
            self._stale |= stale
            raise

    def close(self) -> None:
        """Release the directory."""
        os.close(self._dir)
        os.close(self._lock)


def _may_read_along(fd: int) -> bool:
    """Whether whoever holds the lock only reads."""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def read_header(fd: int) -> tuple[framing.FileHeader, bytes]:
    """First record and key of an entry file. Raises FramingError or OSError."""
    header = framing.read_file_header(fd, type=layout.ENTRY_TYPE)
    if header.version != layout.ENTRY_VERSION:
        raise framing.FramingError("version")
    return header, layout.header_key(header)
