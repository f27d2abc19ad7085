"""numpy in, numpy out: the embedding API's way to rows. numpy is imported here only, at the first call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pion.errors import CommandError
from pion.limits import FORMATS

if TYPE_CHECKING:
    from pion.store.engine import Engine

_SIDES = (b"_pk", b"_pv")
_FP16 = FORMATS["fp16"]


def store(engine: Engine, ns: bytes, layer: int, k: Any, v: Any, start: int) -> None:
    """Store rows [start, start + n) of one layer on both sides.

    Args:
        k, v: arrays [n, dim]; float32, float16, or bfloat16 words as uint16.

    Raises:
        ValueError: another dtype, or shapes that differ.
    """
    import numpy as np

    formats = {np.dtype(np.float32): "F32", np.dtype(np.float16): "F16", np.dtype(np.uint16): "BF16"}
    k, v = np.asarray(k), np.asarray(v)
    if k.shape != v.shape or k.ndim != 2:
        raise ValueError(f"k {k.shape} and v {v.shape} must both be [rows, dim]")
    for side, array in zip(_SIDES, (k, v), strict=True):
        if array.dtype not in formats:
            raise ValueError(f"{array.dtype} is not float32, float16 or uint16 (bfloat16 words)")
        rows = np.ascontiguousarray(array)
        engine.v_store(ns + side, layer, start, len(rows), rows.data.cast("B"), formats[array.dtype])


def fetch(engine: Engine, ns: bytes) -> list[tuple[Any, Any]]:
    """Every layer as (K, V), each [rows, dim].

    Raises:
        CommandError: unknown, incomplete, or with sides of different length.
    """
    import numpy as np

    columns = []
    for side in _SIDES:
        about = engine.v_info(ns + side)
        lengths = set(about.rows)
        if len(lengths) != 1:
            raise CommandError(f"ERR the layers of the prefix have different lengths: {sorted(lengths)}")
        rows = lengths.pop()
        column = []
        for (dim, fmt), body in zip(about.layers, engine.v_fetch_batch(ns + side, 0, rows, native=True), strict=True):
            out = np.empty((rows, dim), np.float16 if fmt == _FP16 else np.float32)
            if body is not None:
                body.readinto(out.data.cast("B"))
            column.append(out)
        columns.append(column)
    if len(columns[0]) != len(columns[1]):
        raise CommandError("ERR the sides of the prefix have different numbers of layers")
    return list(zip(*columns, strict=True))
