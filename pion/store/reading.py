"""What a fetch answers: the rows of one layer as pieces of the entry's file, decoded or as they are stored."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from pion import limits
from pion._core import vstore
from pion._core.stream import MIXED, RAW, Extents
from pion._core.vstore import GROUP
from pion.errors import CommandError
from pion.store import loader
from pion.store.entries import Entry

if TYPE_CHECKING:
    from pion._core.stream import FdRef
    from pion.store.layout import Side
    from pion.store.store import Store

_FP16: Final = limits.FORMATS["fp16"]
_FP32: Final = limits.FORMATS["fp32"]


SEALED: Final = 1  # kinds of pieces, see Rows.pieces
LOOSE: Final = 2


def theta_of(entry: Entry, fmt: int) -> float:
    """The base of the rotary embedding that a key form takes out: of the entry, when it knows what a head is."""
    return (entry.declared.rope or 0.0) if vstore.is_keys(fmt) and fmt >> 8 else 0.0


class Run(NamedTuple):
    """Neighbouring rows that are stored alike: format, first row, rows, stored bytes; or rows that are not stored."""

    fmt: int
    start: int
    rows: int
    nbytes: int
    missing: bool


class StoredRows(NamedTuple):
    """Rows [start, start + rows) of a layer as they are stored.

    Attributes:
        dim: values per row.
        theta: base of the rotary embedding of the keys, 0 = none.
        runs: what the rows are, in order.
        segments: (file, offset, nbytes) of their bytes, in order, without those that are not stored.
    """

    dim: int
    start: int
    rows: int
    theta: float
    runs: list[Run]
    segments: list[tuple[FdRef | None, int, int]]

    @property
    def nbytes(self) -> int:
        """Stored bytes."""
        return sum(run.nbytes for run in self.runs)


def _there(store: Store, entry: Entry, side: int, layer: int, start: int, end: int) -> bool:
    """Whether the layer has any of these rows; they are then known to be intact.

    Raises:
        CommandError: rows of a declared prefix are missing.
        DamagedError: a checksum is wrong.
    """
    assert entry.rows is not None
    if start >= entry.rows.tokens(side, layer):
        return False
    if entry.declared.rows is not None:
        _check_declared(entry, side, layer, start, end)
    loader.check_rows(store, entry, side, layer, start, end)
    return True


def _check_declared(entry: Entry, side: int, layer: int, start: int, end: int) -> None:
    """Of a declared prefix the rows asked for are there or they are an error, never zeros."""
    rows, declared = entry.rows, entry.declared
    assert rows is not None
    assert declared.rows is not None
    assert declared.layers is not None
    if end > declared.rows or not 0 <= layer < declared.layers:
        raise CommandError(
            f"ERR V.FETCH: layer {layer} rows {start}..{end} are outside the declared "
            f"{declared.layers} layers of {declared.rows} rows"
        )
    if not rows.covers(side, layer, start, end):
        raise CommandError(
            f"ERR V.FETCH: layer {layer} does not hold all rows {start}..{end} "
            f"(it has {rows.live(side, layer)} of the declared {declared.rows})"
        )


def _pieces(
    store: Store, entry: Entry, side: int, layer: int, start: int, end: int, stride: int
) -> list[tuple[FdRef | None, int, int]]:
    assert entry.rows is not None
    segments = entry.rows.segments(store.ref(entry), side, layer, start, end, stride)
    if len(segments) > limits.COMPACT_EXTENTS and store.fragmented is not None:
        store.fragmented(entry, quiet=True)
    return segments


def rows(
    store: Store, entry: Entry, about: Side, side: int, layer: int, start: int, end: int, *, native: bool
) -> Extents | None:
    """Rows [start, end) of a layer as FP32, or (native) the words of an fp16 layer; None when it has none of them."""
    if not _there(store, entry, side, layer, start, end):
        return None
    dim, fmt = about.of(layer)
    if vstore.is_keys(fmt):
        return decoded_keys(store, entry, side, layer, dim, fmt, start, end)
    segments = _pieces(store, entry, side, layer, start, end, vstore.row_bytes(fmt, dim))
    if fmt == _FP32 or (native and fmt == _FP16):
        return Extents(segments)
    return Extents(segments, fmt, dim)


def stored(store: Store, entry: Entry, about: Side, side: int, layer: int, start: int, end: int) -> StoredRows | None:
    """Rows [start, end) of a layer as they are stored; None when it has none of them."""
    if not _there(store, entry, side, layer, start, end):
        return None
    dim, fmt = about.of(layer)
    if vstore.is_keys(fmt):
        return _stored_keys(store, entry, side, layer, dim, fmt, start, end)
    stride = vstore.row_bytes(fmt, dim)
    runs: list[Run] = []
    present = []
    at = start
    for segment in _pieces(store, entry, side, layer, start, end, stride):
        count, missing = segment[2] // stride, segment[0] is None
        nbytes = 0 if missing else segment[2]
        if not missing:
            present.append(segment)
        if runs and runs[-1].missing == missing:
            last = runs[-1]
            runs[-1] = last._replace(rows=last.rows + count, nbytes=last.nbytes + nbytes)
        else:
            runs.append(Run(fmt, at, count, nbytes, missing))
        at += count
    return StoredRows(dim, start, end - start, 0.0, runs, present)


def by_ids(store: Store, entry: Entry, about: Side, side: int, layer: int, ids: list[int]) -> Extents | None:
    """Rows in the order of `ids`, as FP32; zeros for positions the layer does not have, None when it has none."""
    assert entry.rows is not None
    tokens = entry.rows.tokens(side, layer)
    if not any(0 <= row < tokens for row in ids):
        return None
    if entry.declared.rows is not None:
        for row in ids:
            _check_declared(entry, side, layer, row, row + 1)
    dim, fmt = about.of(layer)
    stride = vstore.row_bytes(fmt, dim)
    ref = store.ref(entry)
    segments: list[Any] = []
    for row, end in _runs(ids):
        if 0 <= row < tokens:
            loader.check_rows(store, entry, side, layer, row, end)
        if vstore.is_keys(fmt):
            if 0 <= row < tokens:
                segments += _key_segments(ref, entry, side, layer, dim, fmt, row, end)
            else:
                segments.append((None, 0, 2 * dim * (end - row), _FP16, 0, end - row, 0))
        elif 0 <= row < tokens:
            segments += entry.rows.segments(ref, side, layer, row, end, stride)
        else:
            segments.append((None, 0, (end - row) * stride))
    if vstore.is_keys(fmt):
        return Extents(segments, MIXED, dim, theta=theta_of(entry, fmt))
    return Extents(segments, RAW if fmt == _FP32 else fmt, dim)


def _runs(ids: list[int]) -> Iterator[tuple[int, int]]:
    """Neighbours in a list of positions as [start, end); negative ones one by one."""
    start, end = ids[0], ids[0] + 1
    for row in ids[1:]:
        if row == end and start >= 0:
            end += 1
        else:
            yield start, end
            start, end = row, row + 1
    yield start, end


# --- key forms: sealed groups of rows, and loose rows ----------------------------------------------------------------


def _key_segments(
    ref: FdRef, entry: Entry, side: int, layer: int, dim: int, fmt: int, start: int, end: int
) -> list[tuple[FdRef | None, int, int, int, int, int, int]]:
    """Rows [start, end) as segments of mixed extents."""
    assert entry.rows is not None
    out: list[tuple[FdRef | None, int, int, int, int, int, int]] = []
    stride = vstore.row_bytes(fmt, dim)
    for kind, offset, row, count in entry.rows.pieces(side, layer, start, end):
        if kind == SEALED:
            first, last = row // GROUP * GROUP, -(-(row + count) // GROUP) * GROUP
            out.append((ref, offset, (last - first) * stride, fmt, row - first, count, first))
        else:
            out.append((ref if kind == LOOSE else None, offset, count * 2 * dim, _FP16, 0, count, row))
    return out


def decoded_keys(
    store: Store, entry: Entry, side: int, layer: int, dim: int, fmt: int, start: int, end: int
) -> Extents:
    """Rows [start, end) of a key form as FP32."""
    segments = _key_segments(store.ref(entry), entry, side, layer, dim, fmt, start, end)
    if len(segments) > limits.COMPACT_EXTENTS and store.fragmented is not None:
        store.fragmented(entry, quiet=True)
    return Extents(segments, MIXED, dim, theta=theta_of(entry, fmt))


def _stored_keys(
    store: Store, entry: Entry, side: int, layer: int, dim: int, fmt: int, start: int, end: int
) -> StoredRows:
    runs: list[Run] = []
    present: list[tuple[FdRef | None, int, int]] = []
    for ref, offset, nbytes, held, skip, count, first in _key_segments(
        store.ref(entry), entry, side, layer, dim, fmt, start, end
    ):
        missing = ref is None
        rows = -(-(skip + count) // GROUP) * GROUP if held == fmt else count
        if not missing:
            present.append((ref, offset, nbytes))
        run = Run(held, first, rows, 0 if missing else nbytes, missing)
        last = runs[-1] if runs else None
        if last is not None and (last.fmt, last.missing, last.start + last.rows) == (held, missing, first):
            runs[-1] = last._replace(rows=last.rows + rows, nbytes=last.nbytes + run.nbytes)
        else:
            runs.append(run)
    return StoredRows(dim, start, end - start, theta_of(entry, fmt), runs, present)
