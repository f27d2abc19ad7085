"""A prefix as a file that the server writes for it (V.EXPORT): the published client's way.

mlx is imported inside functions.
"""

from __future__ import annotations

import json
import mmap
import os
from typing import Any, Final

from pion.client.blank import Job, filled_arrays
from pion.client.caches import Layout
from pion.client.connection import Flight, Steps, raise_first
from pion.client.errors import IncompleteError, LaneError
from pion.client.restore import ROOM

__all__ = ["exported"]

_LONGEST_HEADER: Final = 1 << 20


def exported(ns: str, infos: list[Any], layout: Layout, count: int) -> Steps[list[tuple[Any, Any]]]:
    """All rows of a prefix as arrays (1, heads, count + ROOM, head_dim).

    Raises:
        LaneError: the model's words are not fp16, or the file cannot be opened here.
        IncompleteError: the prefix was replaced meanwhile.
        CommandError: the server refused.
    """
    if layout.dtype != "float16":
        raise LaneError(f"PION_LANE=export: V.EXPORT writes fp16, this model computes in {layout.dtype}")
    sids = f"{ns}_pk", f"{ns}_pv"
    shape = layout.cache_len, layout.n_kv_heads, layout.head_dim
    path, *behind = yield Flight([["V.EXPORT", *sids, 0, count, *shape], *[["V.INFO", sid] for sid in sids]])
    raise_first([path])
    if behind != infos:
        raise IncompleteError("the prefix was replaced while it was fetched")
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapping:
            return _arrays(memoryview(mapping), layout, count)
    except OSError as error:
        raise LaneError(f"PION_LANE=export: {os.fsdecode(path)} cannot be opened: {error.strerror}") from error


def _arrays(data: memoryview, layout: Layout, count: int) -> list[tuple[Any, Any]]:
    with data:
        length = int.from_bytes(data[:8], "little")
        if length > _LONGEST_HEADER:
            raise IncompleteError("the exported file has no header")
        tensors = json.loads(bytes(data[8 : 8 + length]))
        heads, width = layout.n_kv_heads, 2 * layout.head_dim
        names = [f"{side}.{layer}" for layer in range(layout.cache_len) for side in "kv"]
        shape = (1, heads, count + ROOM, layout.head_dim)
        each, into = count * width, (count + ROOM) * width
        parts: list[list[memoryview]] = []
        for name in names:
            about = tensors.get(name, {})
            if (about.get("dtype"), about.get("shape")) != ("F16", [1, heads, count, layout.head_dim]):
                raise IncompleteError(f"the exported file has no {name} of the model's shape")
            first = 8 + length + about["data_offsets"][0]
            parts.append([data[first + head * each : first + (head + 1) * each] for head in range(heads)])

        def jobs(number: int, view: memoryview) -> list[Job]:
            return [(view[head * into : (head + 1) * into], [(0, parts[number][head])]) for head in range(heads)]

        arrays, _ = filled_arrays([(shape, "float16")] * len(names), jobs, 1, width)
        for part in parts:
            for piece in part:
                piece.release()
    return list(zip(arrays[::2], arrays[1::2], strict=True))
