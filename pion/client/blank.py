"""mlx arrays whose memory nobody has touched yet, and which are filled from outside.

mlx offers no such thing itself: ``mx.zeros`` writes every page, ``mx.array`` copies. Loading tensors from a file object
does: ``mx.load`` allocates each one and hands its memory to the object's ``readinto``, which here takes note of it and
writes nothing. (In mlx 0.32 tensors of a file object are loaded at once, not when they are needed.)

mlx is imported inside functions.
"""

from __future__ import annotations

import json
import math
import os
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final

from pion._core import headrows

__all__ = ["Job", "blank_arrays", "filled_arrays", "threads"]

Job = tuple[memoryview, list[tuple[int, memoryview]]]
"""Memory, and what belongs into it, as `headrows.fill` has it."""

_NAMES: Final = {
    "float16": ("F16", 2), "bfloat16": ("BF16", 2), "float32": ("F32", 4), "uint8": ("U8", 1), "int8": ("I8", 1),
    "uint16": ("U16", 2), "int16": ("I16", 2), "uint32": ("U32", 4), "int32": ("I32", 4), "uint64": ("U64", 8),
    "int64": ("I64", 8), "bool": ("BOOL", 1), "complex64": ("C64", 8),
}  # fmt: skip


_PATIENCE: Final = 1.0  # seconds
_MOST_THREADS: Final = 4  # more would wait for memory


def threads() -> int:
    """Threads that share the filling of arrays."""
    try:
        allowed = len(os.sched_getaffinity(0))
    except AttributeError:  # macOS
        allowed = os.cpu_count() or 1
    return max(1, min(allowed, _MOST_THREADS, headrows.MAX_THREADS))


class _Nothing:
    """A safetensors file of tensors without content.

    Attributes:
        found: memory that content was asked for, by its place in the file.
    """

    closed = False

    def __init__(self, tensors: dict[str, Any], nbytes: int) -> None:
        text = json.dumps(tensors).encode()
        self.head = len(text).to_bytes(8, "little") + text
        self._size = len(self.head) + nbytes
        self._at = 0
        self.found: dict[int, memoryview] = {}

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def writable(self) -> bool:
        return False

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, self._size)[whence]
        return self._at

    def read(self, size: int) -> bytes:
        data = bytearray(size)
        self.readinto(memoryview(data))
        return bytes(data)

    def readinto(self, memory: Any) -> int:
        view = memoryview(memory).cast("B")
        if self._at < len(self.head):
            part = self.head[self._at : self._at + len(view)]
            count = len(part)
            view[:count] = part
        else:
            count = len(view)
            self.found[self._at - len(self.head)] = view
        self._at += count
        return count


def _wait(gone: weakref.ref[_Nothing]) -> None:
    """Until mlx's threads have let go of a file object, a moment after its tensors are there: one that does
    so while the interpreter ends would abort the process."""
    end = time.monotonic() + _PATIENCE
    while gone() is not None and time.monotonic() < end:
        time.sleep(0.00002)


def blank_arrays(wanted: Sequence[tuple[tuple[int, ...], str]]) -> tuple[list[Any], list[memoryview]]:
    """Evaluated mlx arrays with arbitrary content, which nothing else refers to.

    Args:
        wanted: (shape, dtype by name) of each.

    Returns:
        The arrays, and the memory of each as bytes, to be written to while the array lives.

    Raises:
        ValueError: a dtype that safetensors does not know.
    """
    import mlx.core

    mx: Any = mlx.core
    tensors: dict[str, Any] = {}
    places: list[tuple[int, int]] = []
    at = 0
    for number, (shape, dtype) in enumerate(wanted):
        if dtype not in _NAMES:
            raise ValueError(f"no arrays of dtype {dtype} can be made")
        name, width = _NAMES[dtype]
        nbytes = math.prod(shape) * width
        tensors[str(number)] = {"dtype": name, "shape": list(shape), "data_offsets": [at, at + nbytes]}
        places.append((at, nbytes))
        at += nbytes
    file = _Nothing(tensors, at)
    loaded = mx.load(file, format="safetensors")
    arrays = [loaded.pop(str(number)) for number in range(len(wanted))]
    views = [file.found.pop(offset, memoryview(b"")) for offset, _ in places]
    gone = weakref.ref(file)
    del file
    _wait(gone)
    for number, ((shape, dtype), (_, nbytes)) in enumerate(zip(wanted, places, strict=True)):
        if len(views[number]) != nbytes:  # another mlx reads files in another way
            arrays[number] = mx.zeros(shape, mx.bool_ if dtype == "bool" else getattr(mx, dtype))
            mx.eval(arrays[number])
            views[number] = memoryview(arrays[number].view(mx.uint8)).cast("B")
    return arrays, views


def filled_arrays(
    wanted: Sequence[tuple[tuple[int, ...], str]], jobs: Callable[[int, memoryview], list[Job]], heads: int,
    head_bytes: int,
) -> tuple[list[Any], list[memoryview]]:  # fmt: skip
    """`blank_arrays`, filled by several threads.

    Args:
        wanted: (shape, dtype by name) of each.
        jobs: given the number of an array and its memory, what `headrows.fill` is to do there; nothing: it stays blank.
        heads, head_bytes: as in `headrows.fill`.

    Raises:
        ValueError: as in `blank_arrays` and in `headrows.fill`.
    """
    arrays, views = blank_arrays(wanted)
    work = [job for number, view in enumerate(views) for job in jobs(number, view)]
    if work:
        headrows.fill(work, heads, head_bytes, threads=threads(), fresh=True)
    return arrays, views
