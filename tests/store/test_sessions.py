"""Sessions: formats in and out, the rules of fetching, rollback."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from pion._core import quant
from pion.errors import CommandError
from pion.store.engine import Engine

from .model import BF16, F16, F32, INT8, words
from .support import DIM, WORDS, fetched, stored

# --- formats ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("source", [F32, F16, BF16])
@pytest.mark.parametrize("target", [F32, F16, BF16, INT8])
def test_every_way_in(engine: Engine, source: int, target: int, streamed: bool) -> None:
    """Both doors store what the codec says; a large body goes through a sink."""
    rows, dim = 700, 96
    engine.v_create(b"s", dim, target)
    engine.v_create(b"first", dim, target)
    blob = words(3, rows, dim, source)
    word = WORDS[source]
    for start in (0, rows):  # twice: behind another record, and with one behind it
        if streamed:
            sink = engine.v_store_open(b"s", 0, start, rows, len(blob))
            engine.v_store(b"s", 1, start, 1, words(4, 1, dim, source), word)
            for at in range(0, len(blob), 100_001):
                sink.feed(blob[at : at + 100_001])
            assert engine.v_store_heavy(sink, word) == (source != target and source != F32)
            engine.v_store_finish(sink, word)
        else:
            engine.v_store(b"s", 0, start, rows, blob, word)
    kept = bytes(quant.encode(source, target, blob, dim))
    assert stored(engine, b"s", 0, 0, 2 * rows) == kept * 2
    assert fetched(engine, b"s", 0, rows) == bytes(quant.decode(target, kept, dim))
    native = fetched(engine, b"s", 0, rows, native=True)
    assert native == (kept if target == F16 else bytes(quant.decode(target, kept, dim)))
    engine.close()
    root = engine.root
    with Engine(root, ticker=False) as again:
        assert again.v_info(b"s").rows == [2 * rows, rows + 1 if streamed else 0][: 2 if streamed else 1]
        assert stored(again, b"s", 0, 0, 2 * rows) == kept * 2
        assert again.info()["vstore_quarantined"] == 0


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(("target", "name"), [(F16, "fp16"), (INT8, "int8")])
@pytest.mark.parametrize("source", ["F32", "BF16"])
def test_c9_what_does_not_fit_is_refused_with_its_row(
    engine: Engine, source: str, target: int, name: str, streamed: bool
) -> None:
    values = np.zeros((50, DIM), np.float32)
    values[37, 5] = 1e5
    blob = values.tobytes() if source == "F32" else (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    engine.v_create(b"s", DIM, target)
    size = engine.info()["vstore_file_bytes"]
    if streamed:
        sink = engine.v_store_open(b"s", 0, 0, 50, len(blob))
        sink.feed(blob)
    with pytest.raises(CommandError, match=rf"row 37 .*{name}"):
        engine.v_store_finish(sink, source) if streamed else engine.v_store(b"s", 0, 0, 50, blob, source)
    assert engine.v_info(b"s").rows in ([], [0])
    assert engine.v_fetch_range(b"s", 0, 0, 50) is None
    assert engine.info()["vstore_file_bytes"] == size


def test_fetch_rules_of_undeclared_sessions(engine: Engine) -> None:
    engine.v_create(b"s", 2, F32)
    row = struct.pack("<2f", 1, 2)
    engine.v_store(b"s", 0, 3, 1, row)
    zero = bytes(8)
    assert fetched(engine, b"s", 0, 6) == zero * 3 + row + zero * 2
    assert engine.v_fetch_range(b"s", 0, 4, 6) is None
    assert engine.v_fetch_range(b"s", 7, 0, 1) is None
    assert engine.v_fetch_range(b"s", 200, 0, 1) is None
    ids = engine.v_fetch_ids(b"s", 0, [3, 9, 0, 3, -1])
    assert ids is not None
    assert ids.tobytes() == row + zero + zero + row + zero
    assert engine.v_fetch_ids(b"s", 0, [4, 9]) is None
    engine.v_store(b"s", 2, 0, 1, row)
    batch = engine.v_fetch_batch(b"s", 0, 1)
    assert [body and body.tobytes() for body in batch] == [zero, None, row]
    assert len(engine.v_fetch_batch(b"s", 0, 1, 2)) == 2
    assert len(engine.v_fetch_batch(b"s", 0, 1, 9)) == 3


def test_what_a_store_must_say(engine: Engine) -> None:
    engine.v_create(b"s", 2, F32)
    for place, text in [
        ((-1, 0, 1, bytes(8)), "ERR invalid layer_id/start_id/count"),
        ((0, -1, 1, bytes(8)), "ERR invalid layer_id/start_id/count"),
        ((0, 0, 0, b""), "ERR invalid layer_id/start_id/count"),
        ((80, 0, 1, bytes(8)), "ERR V.STOREBATCH: layer_id exceeds MAX_VS_LAYERS"),
        ((0, 199_999, 2, bytes(16)), "ERR V.STOREBATCH failed"),
        ((0, 0, 2, bytes(8)), "ERR V.STOREBATCH: blob size 8 != expected 16 (count=2 × per_layer_dim=2 × 4)"),
    ]:
        with pytest.raises(CommandError) as info:
            engine.v_store(b"s", *place)
        assert str(info.value) == text
    with pytest.raises(CommandError, match=r"^ERR session not found$"):
        engine.v_store(b"t", 0, 0, 1, bytes(8))


# --- rollback --------------------------------------------------------------------------------------------------------


def test_restore_cuts_and_later_rows_replace(engine: Engine, tmp_path: Path) -> None:
    engine.v_create(b"s", 2, F32)
    engine.v_store(b"s", 0, 0, 4, words(1, 4, 2, F32))
    snap = engine.v_snapshot(b"s")
    engine.v_store(b"s", 0, 4, 4, words(2, 4, 2, F32))
    engine.v_store(b"s", 1, 0, 4, words(3, 4, 2, F32))
    engine.v_restore(b"s", snap)
    assert engine.v_info(b"s").rows == [4, 0]
    assert engine.v_fetch_range(b"s", 0, 4, 8) is None
    engine.v_store(b"s", 0, 4, 1, words(4, 1, 2, F32))
    want = words(1, 4, 2, F32) + words(4, 1, 2, F32)
    assert fetched(engine, b"s", 0, 5) == want
    assert engine.v_commit(b"s", snap) == 1
    assert engine.v_commit(b"s", snap) == 0
    with pytest.raises(CommandError, match="unknown snap_id"):
        engine.v_restore(b"s", snap)
    for _ in range(16):
        last = engine.v_snapshot(b"s")
    assert last == snap + 16
    with pytest.raises(CommandError, match=r"no free snapshot slot \(max 16 per session\)"):
        engine.v_snapshot(b"s")
    engine.close()
    with Engine(tmp_path / "data", ticker=False) as again:
        assert again.v_info(b"s").rows == [5, 0]
        assert fetched(again, b"s", 0, 5) == want
