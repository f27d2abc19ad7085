"""A small engine to test with, and prefixes to put into it."""

from __future__ import annotations

import shutil
from pathlib import Path

from pion._core import quant, stream
from pion._core.stream import Extents
from pion.store.engine import Engine

from .model import BF16, F16, F32, words

DIM = 64
WORDS = {F32: "F32", F16: "F16", BF16: "BF16"}


def fill(engine: Engine, ns: bytes, rows: int = 16, layers: int = 2, fmt: int = F16, **options: object) -> bytes:
    """A complete declared prefix; every layer of both sides holds the same words, which are returned."""
    engine.register(ns, DIM, fmt, rows=rows, layers=layers, **options)  # type: ignore[arg-type]
    blob = words(rows, rows, DIM, fmt)
    for layer in range(layers):
        for side in (b"_pk", b"_pv"):
            engine.v_store(ns + side, layer, 0, rows, blob, WORDS[fmt])
    return blob


def fetched(engine: Engine, sid: bytes, layer: int, end: int, **how: bool) -> bytes:
    body = engine.v_fetch_range(sid, layer, 0, end, **how)
    assert body is not None
    return body.tobytes()


def crash(root: Path | None, to: Path) -> Path:
    """What a kill would leave: a copy of the directory, taken while an engine has it open."""
    assert root is not None
    stream.drain()  # else files of the trash vanish while they are copied
    shutil.copytree(root, to)
    return to


def stored(engine: Engine, sid: bytes, layer: int, start: int, end: int) -> bytes | None:
    """Rows as they are stored, in one format; zeros of the stored size for those that are not."""
    found = engine.v_fetch_stored(sid, layer, start, end)
    if found is None:
        return None
    assert len({run.fmt for run in found.runs}) == 1
    body, stride = Extents(found.segments).tobytes(), quant.row_bytes(found.runs[0].fmt, found.dim)
    out, at = b"", 0
    for run in found.runs:
        out += bytes(run.rows * stride) if run.missing else body[at : at + run.nbytes]
        at += run.nbytes
    assert (at, len(out)) == (len(body), (end - start) * stride)
    return out
