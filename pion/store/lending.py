"""Files that clients of the same machine may have mapped, and removed files that somebody still holds."""

from __future__ import annotations

import errno
import fcntl
import signal
import sys
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pion import limits
from pion.store.caps import descriptor_cap

if TYPE_CHECKING:
    from pion._core.stream import FdRef

__all__ = ["Lending", "others_hold"]


@dataclass(slots=True)
class _Removed:
    file: FdRef
    nbytes: int
    lent: bool  # somebody outside this process may have it


class Lending:
    """Which files were lent, and which removed ones are still held. The store's lock is held in every call."""

    def __init__(self) -> None:
        self._lent: OrderedDict[int, FdRef] = OrderedDict()  # by generation
        self._removed: list[_Removed] = []

    def lend(self, generation: int, ref: FdRef) -> None:
        """A client got a descriptor of this file. Of those lent longest ago it is forgotten when there are too many."""
        self._lent[generation] = ref
        self._lent.move_to_end(generation)
        while len(self._lent) > min(limits.LANE_LENT, descriptor_cap() // 2):
            self._lent.popitem(last=False)

    def removed(self, ref: FdRef | None, nbytes: int, generation: int) -> None:
        """A file has lost its name."""
        lent = self._lent.pop(generation, None)
        if lent is not None and others_hold(lent.fileno()):
            self._removed.append(_Removed(lent, nbytes, True))
        elif ref is not None and ref.refs > 1:
            self._removed.append(_Removed(ref, nbytes, False))

    def look(self) -> None:
        """Ask the kernel which of the lent files are still held. Once a second."""
        for generation in [one for one, ref in self._lent.items() if not others_hold(ref.fileno())]:
            del self._lent[generation]
        for item in self._removed:
            item.lent = item.lent and others_hold(item.file.fileno())

    def held_bytes(self) -> int:
        """Bytes of removed files that are still held, as of the last look."""
        if self._removed:
            self._removed = [item for item in self._removed if item.lent or item.file.refs > 1]
        return sum(item.nbytes for item in self._removed)


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
