"""Evaluated arrays of this process, kept for the next one who asks for the same prefix: no server, no file.

An array that somebody appends to must not be referred to by anybody else, or the first append copies it as a whole. So
what is kept here are copies, and what is handed out are copies again, each with its own memory.

mlx is imported inside functions.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from pion.client.blank import Job, blank_arrays, filled_arrays

__all__ = ["DEFAULT_BYTES", "NO_INPROC", "LocalCopies"]

DEFAULT_BYTES: Final = 256 << 20
NO_INPROC: Final = "PION_PROMPT_CACHE_NO_INPROC"  # of the published client: set, nothing is kept
_SEEN: Final = 4096  # names whose uses are remembered

Key = tuple[str, str]


class _Kept(NamedTuple):
    arrays: list[Any]
    views: list[memoryview]
    nbytes: int


def copies(arrays: Sequence[Any]) -> tuple[list[Any], list[memoryview]]:
    """Independent, evaluated copies of mlx arrays, and their memory."""
    import mlx.core as mx

    mx.eval(list(arrays))
    sources = [_memory(array) for array in arrays]
    return _copied([(tuple(array.shape), str(array.dtype).rpartition(".")[2]) for array in arrays], sources)


def _memory(array: Any) -> memoryview:
    import mlx.core as mx

    if array.dtype in (mx.bfloat16, mx.float16):
        array = array.view(mx.uint16)
    return np.ascontiguousarray(memoryview(array)).reshape(-1).view(np.uint8).data


def _copied(
    wanted: list[tuple[tuple[int, ...], str]], sources: Sequence[memoryview]
) -> tuple[list[Any], list[memoryview]]:
    made: list[Any] = [None] * len(wanted)
    views = [memoryview(b"")] * len(wanted)
    by_size: dict[int, list[int]] = {}
    for number, source in enumerate(sources):
        by_size.setdefault(len(source), []).append(number)
    for size, same in by_size.items():  # each is one long row of one head
        group = [wanted[number] for number in same]

        def jobs(number: int, view: memoryview, same: list[int] = same) -> list[Job]:
            return [(view, [(0, sources[same[number]])])]

        arrays, memory = filled_arrays(group, jobs, 1, size) if size else blank_arrays(group)
        for number, array, view in zip(same, arrays, memory, strict=True):
            made[number], views[number] = array, view
    return made, views


class LocalCopies:
    """Copies of the arrays of prefixes, the least recently used goes first. Any thread.

    Args:
        max_bytes: of all of them; 0 keeps none. ``PION_PROMPT_CACHE_NO_INPROC=1`` in the environment does the same.
    """

    def __init__(self, max_bytes: int = DEFAULT_BYTES) -> None:
        if max_bytes < 0:
            raise ValueError("local_bytes is a number of bytes, or 0 to keep none")
        off = os.environ.get(NO_INPROC, "") not in ("", "0")
        self.max_bytes = 0 if off else max_bytes
        self.nbytes = 0
        self.hits = 0
        self._lock = threading.Lock()
        self._kept: OrderedDict[Key, _Kept] = OrderedDict()
        self._seen: OrderedDict[Key, None] = OrderedDict()

    def get(self, ns: str, digest: str) -> list[Any] | None:
        """Fresh copies of the arrays of a prefix, in the order they were put; None when they are not here."""
        with self._lock:
            kept = self._kept.get((ns, digest))
            if kept is None:
                return None
            self._kept.move_to_end((ns, digest))
            self.hits += 1
        wanted = [(tuple(array.shape), str(array.dtype).rpartition(".")[2]) for array in kept.arrays]
        return _copied(wanted, kept.views)[0]

    def has(self, ns: str, digest: str) -> bool:
        """Whether `get` would give something."""
        with self._lock:
            return (ns, digest) in self._kept

    def put(self, ns: str, digest: str, arrays: Sequence[Any]) -> bool:
        """Keep copies of evaluated mlx arrays, from the second time on that they are offered: a prefix that a process
        uses once is not worth the copying. Returns whether they are kept now."""
        key, nbytes = (ns, digest), sum(array.nbytes for array in arrays)
        with self._lock:
            if key in self._kept:
                return True
            again = key in self._seen
            self._seen[key] = None
            self._seen.move_to_end(key)
            if len(self._seen) > _SEEN:
                self._seen.popitem(last=False)
        if not again or not 0 < nbytes <= self.max_bytes:
            return False
        kept = _Kept(*copies(arrays), nbytes)
        with self._lock:
            if key not in self._kept:
                self._kept[key] = kept
                self.nbytes += nbytes
            while self.nbytes > self.max_bytes:
                self._remove(next(iter(self._kept)))
            return key in self._kept

    def drop(self, *names: str) -> None:
        """Forget what is kept of these namespaces."""
        with self._lock:
            for key in [key for key in self._kept if key[0] in names]:
                self._remove(key)

    def _remove(self, key: Key) -> None:
        self.nbytes -= self._kept.pop(key).nbytes

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._kept.clear()
            self._seen.clear()
            self.nbytes = 0
