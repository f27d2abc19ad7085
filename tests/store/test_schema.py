"""Layers that differ in dimension and format, K and V apart."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pion._core import quant
from pion.errors import CommandError, MismatchError
from pion.store import layout
from pion.store.engine import Engine
from pion.store.layout import Side

from .model import BF16, F16, F32, INT8, words
from .support import WORDS, crash, fetched, stored

K = ((64, F16), (32, F32), (33, INT8))
V = ((64, BF16), (64, INT8), (1, F16))


def _fill(engine: Engine, ns: bytes, rows: int) -> dict[tuple[bytes, int], bytes]:
    """Every layer of both sides; what is stored of each."""
    kept = {}
    for sid, layers in ((ns + b"_pk", K), (ns + b"_pv", V)):
        for layer, (dim, fmt) in enumerate(layers):
            source = F32 if fmt == INT8 else fmt
            blob = words(layer + len(kept), rows, dim, source)
            engine.v_store(sid, layer, 0, rows, blob, WORDS[source])
            kept[sid, layer] = bytes(quant.encode(source, fmt, blob, dim))
    return kept


def _check(engine: Engine, ns: bytes, rows: int, kept: dict[tuple[bytes, int], bytes]) -> None:
    for sid, layers in ((ns + b"_pk", K), (ns + b"_pv", V)):
        about = engine.v_info(sid)
        assert about.layers == list(layers)
        assert about.rows == [rows] * 3
        assert not about.uniform
        for layer, (dim, fmt) in enumerate(layers):
            assert stored(engine, sid, layer, 0, rows) == kept[sid, layer]
            assert fetched(engine, sid, layer, rows) == bytes(quant.decode(fmt, kept[sid, layer], dim))
    assert engine.info()["vstore_bytes"] == sum(map(len, kept.values()))
    assert engine.lookup(ns)
    arrays = engine.fetch(ns)
    assert [(k.shape, k.dtype.name) for k, _ in arrays] == [
        ((rows, 64), "float16"), ((rows, 32), "float32"), ((rows, 33), "float32"),
    ]  # fmt: skip
    assert [(v.shape, v.dtype.name) for _, v in arrays] == [
        ((rows, 64), "float32"), ((rows, 64), "float32"), ((rows, 1), "float16"),
    ]  # fmt: skip


def test_every_layer_is_what_it_was_declared_as_for_good(engine: Engine, tmp_path: Path) -> None:
    engine.register_schema(b"ns", K, V, rows=300)
    assert not engine.lookup(b"ns")
    kept = _fill(engine, b"ns", 300)
    _check(engine, b"ns", 300, kept)
    copied = crash(engine.root, tmp_path / "copy")
    with Engine(copied, ticker=False) as killed:
        _check(killed, b"ns", 300, kept)
    assert engine.compact(b"ns")
    _check(engine, b"ns", 300, kept)
    engine.close()
    with Engine(engine.root, ticker=False) as again:
        assert again.info()["vstore_bytes"] == sum(map(len, kept.values()))
        _check(again, b"ns", 300, kept)
        assert again.info()["vstore_quarantined"] == 0


def test_large_bodies_take_their_layers_form(engine: Engine) -> None:
    """The size of a body tells FP32 from two bytes by the layer's own dimension."""
    engine.v_create(b"s", 0, INT8, ((64, F16), (32, INT8)))
    for layer, dim, fmt in ((0, 64, F16), (1, 32, INT8)):
        blob = words(layer, 500, dim, F32)
        sink = engine.v_store_open(b"s", layer, 0, 500, len(blob))
        sink.feed(blob)
        engine.v_store_finish(sink, "F32")
        assert stored(engine, b"s", layer, 0, 500) == bytes(quant.encode(F32, fmt, blob, dim))
    with pytest.raises(CommandError, match="layer 2 is not among the 2 of the schema"):
        engine.v_store(b"s", 2, 0, 1, bytes(128))


def test_c11_an_entry_is_never_taken_for_another_format(engine: Engine) -> None:
    engine.register_schema(b"ns", K, V)
    kept = _fill(engine, b"ns", 4)
    other = (*K[:2], (33, F16))
    for call, what in (
        (lambda: engine.register_schema(b"ns", other, V), r"layer 2 is int8 of 33, not fp16 of 33"),
        (lambda: engine.register_schema(b"ns", K[:2], V[:2]), r"schema"),
        (lambda: engine.register_schema(b"ns", V, K), r"layer 0 is fp16 of 64, not bf16 of 64"),
        (lambda: engine.register(b"ns", 64, F16), r"layer 1 is fp32 of 32, not fp16 of 64"),
    ):
        with pytest.raises(MismatchError, match=what):
            call()
    with pytest.raises(MismatchError, match="another schema"):
        engine.v_create(b"ns_pk", 0, INT8, V)
    engine.register_schema(b"ns", K, V)
    assert engine.v_create(b"ns_pk", 0, INT8, K) == engine.v_create(b"ns_pk", 512, F32)
    for (sid, layer), blob in kept.items():
        assert stored(engine, sid, layer, 0, 4) == blob
    engine.register_schema(b"ns", V, K, replace=True)
    assert engine.v_fetch_range(b"ns_pk", 0, 0, 4) is None
    engine.register(b"plain", 64, INT8)
    with pytest.raises(MismatchError, match=r"format \(int8, not fp16\)"):
        engine.register(b"plain", 64, F16)
    with pytest.raises(MismatchError, match="schema"):
        engine.register_schema(b"plain", K, V)


def test_a_schema_must_be_whole(engine: Engine) -> None:
    for k, v in ((K, V[:2]), ((), ())):
        with pytest.raises(CommandError, match="as many layers of K as of V"):
            engine.register_schema(b"ns", k, v)
    with pytest.raises(CommandError, match="takes rows of"):
        engine.register_schema(b"ns", ((0, F16),), ((4, F16),))
    assert not engine.v_exists(b"ns_pk")


@pytest.mark.parametrize("layers", [(), K, tuple((8192, F16 if i % 2 else INT8) for i in range(80))])
def test_attributes_keep_a_side(layers: tuple[tuple[int, int], ...]) -> None:
    side = Side(0 if layers else 5, INT8, layers)
    sides, declared = layout.unpack_meta(layout.pack_meta([side, None], layout.UNDECLARED))
    assert sides == [side, None]
    assert declared == layout.UNDECLARED
    assert side.stored_bytes(1, 7) == 7 * side.row_bytes(1)


def test_arrays_of_the_embedding_api(engine: Engine) -> None:
    engine.register_schema(b"ns", ((4, F16), (4, F32)), ((4, F32), (4, F16)))
    k = np.arange(12, dtype=np.float32).reshape(3, 4)
    for layer in range(2):
        engine.store(b"ns", layer, k, -k)
    for keys, values in engine.fetch(b"ns"):
        assert np.array_equal(keys, k)
        assert np.array_equal(values, -k)
