"""Files that clients of the same machine may have mapped, and removed files whose blocks are not free yet.

A removed file is held as long as somebody reads it. After that its blocks are freed in the background, which takes a
millisecond for each MiB or so.
"""

from __future__ import annotations

import errno
import fcntl
import signal
import sys
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from pion import limits
from pion._core.stream import FdRef, Room
from pion.store.caps import descriptor_cap

__all__ = ["Lending", "others_hold"]

_FEW: Final = 64  # files being freed that are looked at each time; of more of them
_LOOK: Final = 2e-6  # seconds pass for each before all are looked at again


@dataclass(slots=True)
class _Removed:
    file: FdRef | None  # while somebody holds it
    nbytes: int
    lent: bool  # somebody outside this process may have it
    room: Room


class Lending:
    """Which files were lent, and which removed ones are still held. The store's lock is held in every call."""

    def __init__(self) -> None:
        self._lent: OrderedDict[int, FdRef] = OrderedDict()  # by generation
        self._removed: list[_Removed] = []  # and held, as far as is known
        self._freeing: list[_Removed] = []
        self._freeing_bytes = 0
        self._look_again = 0.0

    def lend(self, generation: int, ref: FdRef) -> None:
        """A client got a descriptor of this file. Of those lent longest ago it is forgotten when there are too many."""
        self._lent[generation] = ref
        self._lent.move_to_end(generation)
        while len(self._lent) > min(limits.LANE_LENT, descriptor_cap() // 2):
            self._lent.popitem(last=False)

    def removed(self, ref: FdRef | None, nbytes: int, generation: int, room: Room) -> None:
        """A file has lost its name; `room` is its unlink's."""
        lent = self._lent.pop(generation, None)
        for file in (ref, lent):
            if file is not None:
                file.occupy(room)
        if lent is not None and others_hold(lent.fileno()):
            self._removed.append(_Removed(lent, nbytes, True, room))
        else:
            held = ref is not None and ref.refs > 1
            self._removed.append(_Removed(ref if held else None, nbytes, False, room))

    def file(self, generation: int) -> FdRef | None:
        """The descriptor that was lent."""
        return self._lent.get(generation)

    def holds(self, generation: int) -> bool:
        """Whether somebody outside this process has this file."""
        lent = self._lent.get(generation)
        return lent is not None and others_hold(lent.fileno())

    def look(self) -> None:
        """Ask the kernel which of the lent files are still held. Once a second."""
        for generation in [one for one, ref in self._lent.items() if not others_hold(ref.fileno())]:
            del self._lent[generation]
        for item in self._removed:
            item.lent = item.lent and item.file is not None and others_hold(item.file.fileno())

    def gone_bytes(self) -> tuple[int, int]:
        """Bytes of removed files: (still held, as of the last look; being freed, as of a moment ago)."""
        if not self._removed:
            return (0, self._looked_at_freeing()) if self._freeing else (0, 0)
        left, held = [], 0
        for item in self._removed:
            if item.lent or (item.file is not None and item.file.refs > 1):
                held += item.nbytes
                left.append(item)
            else:
                item.file = None  # closes it
                self._freeing.append(item)
                self._freeing_bytes += item.nbytes
        self._removed = left
        return held, self._looked_at_freeing()

    def _looked_at_freeing(self) -> int:
        if len(self._freeing) > _FEW:
            now = time.monotonic()
            if now < self._look_again:
                return self._freeing_bytes
            self._look_again = now + len(self._freeing) * _LOOK
        self._freeing = [item for item in self._freeing if item.room.taken]
        self._freeing_bytes = sum(item.nbytes for item in self._freeing)
        return self._freeing_bytes


def others_hold(fd: int) -> bool:
    """Whether anybody else has this file open or mapped: a write lease is then refused. False where none can be had.

    The signal of a broken lease would end the process; it is replaced by one that is ignored.
    """
    if sys.platform != "linux":
        return False
    try:
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    except OSError as error:
        return error.errno == errno.EAGAIN
    fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return False
