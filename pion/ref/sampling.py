"""Twin of `pion._core.sampling`: names and samples of a model's arrays, with memoryviews."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

__all__ = ["parameters", "samples"]


def parameters(root: Any, kind: type) -> list[tuple[str, Any]]:
    """The arrays of a tree of dicts and lists by dotted name, sorted; not those whose key begins with ``_``."""
    return sorted(_walk("", root, kind), key=lambda pair: pair[0])


def _walk(name: str, node: Any, kind: type) -> Iterator[tuple[str, Any]]:
    for key, item in node.items() if isinstance(node, dict) else enumerate(node):
        path = f"{name}.{key}" if name else str(key)
        if isinstance(item, kind):
            if not str(key).startswith("_"):
                yield path, item
        elif isinstance(item, dict | list):
            yield from _walk(path, item, kind)


def samples(buffers: Sequence[Any], count: int, nbytes: int) -> list[bytes]:
    """Of each buffer `count` times `nbytes`, evenly spaced from its beginning to its end."""
    out = []
    for buffer in buffers:
        view = memoryview(buffer)
        if not view.c_contiguous:
            raise BufferError("the buffer is not contiguous")
        raw = view.cast("B")
        last = max(0, len(raw) - nbytes)
        starts = [last * step // (count - 1) for step in range(count)]
        out.append(b"".join(raw[start : start + nbytes] for start in starts))
    return out
