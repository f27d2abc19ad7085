"""Files of the keyspace in a data directory: names, first records, durable creation and removal.

    pion.wal.<n>        log of generation n: every effect since it was begun
    pion.snapshot.<n>   the whole keyspace, as of some time after log n was begun; log n on top of it is the truth
    blob/<id>           one large value; pointed at by records of logs and snapshots

Log n + 1 names log n, and snapshot n names log n, by their random generations: a file that was put beside the others
by hand or left over by a crash is recognised, and never replayed over what is newer.
"""

from __future__ import annotations

import os
import re
import secrets
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pion._core.framing import FramingError, pack_attrs, pack_file_header, read_file_header, seed_of, unpack_attrs
from pion._core.kslog import sync_file

LOG: Final = b"KLOG"
SNAPSHOT: Final = b"KSNP"
VERSION: Final = 1
NUMBER: Final = 1  # attribute: the number in the file's name, u64
BELONGS_TO: Final = 2  # attribute: generation of the log before this log, or beside this snapshot, u64

_NAME = re.compile(r"pion\.(wal|snapshot)\.(\d{1,18})")
_OF_TYPE = {LOG: "wal", SNAPSHOT: "snapshot"}


@dataclass(slots=True)
class Head:
    """What the first record of a log or snapshot says."""

    number: int
    generation: int
    belongs_to: int
    size: int

    @property
    def seed(self) -> int:
        """Start value of the file's checksums."""
        return seed_of(self.generation)


def path_of(root: Path, kind: bytes, number: int) -> Path:
    """Where the log or snapshot of this number stands."""
    return root / f"pion.{_OF_TYPE[kind]}.{number}"


def find(root: Path) -> tuple[list[int], list[int]]:
    """The numbers of the snapshots and of the logs in a directory, ascending."""
    found: dict[str, list[int]] = {"snapshot": [], "wal": []}
    for name in os.listdir(root):
        match = _NAME.fullmatch(name)
        if match and str(int(match[2])) == match[2]:
            found[match[1]].append(int(match[2]))
    return sorted(found["snapshot"]), sorted(found["wal"])


def read_head(fd: int, kind: bytes) -> Head:
    """Decode the first record.

    Raises:
        FramingError: it is not whole, of another kind, or ("version") of another version of the format.
    """
    head = read_file_header(fd, type=kind)
    if head.version != VERSION:
        raise FramingError("version")
    numbers = {key: int.from_bytes(value, "little") for key, value in unpack_attrs(head.attrs)}
    if NUMBER not in numbers:
        raise FramingError("field")
    return Head(numbers[NUMBER], head.generation, numbers.get(BELONGS_TO, 0), head.size)


def create(path: Path, kind: bytes, number: int, belongs_to: int) -> tuple[int, Head]:
    """Begin a log or snapshot; returns its descriptor and head. The file is not durable yet.

    Raises:
        OSError: creating or writing failed; nothing is left behind.
    """
    generation = secrets.randbits(64)
    attrs = pack_attrs([(NUMBER, number.to_bytes(8, "little")), (BELONGS_TO, belongs_to.to_bytes(8, "little"))])
    first = pack_file_header(kind, version=VERSION, generation=generation, attrs=attrs)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        write_all(fd, first)
    except OSError:
        os.close(fd)
        remove(path)
        raise
    return fd, Head(number, generation, belongs_to, len(first))


def write_all(fd: int, data: bytes) -> None:
    """Write at the descriptor's position until everything is out."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def remove(path: Path) -> None:
    """Unlink a file that may be gone."""
    with suppress(FileNotFoundError):
        os.unlink(path)


def sync_directory(path: Path) -> None:
    """Make names durable that were created, renamed or removed in a directory."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def set_aside(path: Path, fd: int, offset: int, nbytes: int) -> Path:
    """Copy a part of a file into `<file>.cut.<offset>` beside it (with a suffix if there is one), durably."""
    target = path.with_name(f"{path.name}.cut.{offset}")
    for attempt in range(1, 10_000):
        if not target.exists():
            break
        target = path.with_name(f"{path.name}.cut.{offset}-{attempt}")
    out = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        end = offset + nbytes
        while offset < end and (piece := os.pread(fd, min(1 << 20, end - offset), offset)):
            write_all(out, piece)
            offset += len(piece)
        sync_file(out)
    finally:
        os.close(out)
    return target


def move_aside(path: Path, name: str = "") -> Path:
    """Rename a file that must not be used to `<file>.unused` (with a suffix if there is one).

    Args:
        name: what it is called in the data directory, when it stands in a directory below.
    """
    folder = path.parent.parent if name else path.parent
    target = folder / f"{name or path.name}.unused"
    for attempt in range(1, 10_000):
        if not os.path.lexists(target):
            break
        target = folder / f"{name or path.name}.unused-{attempt}"
    os.rename(path, target)
    return target
