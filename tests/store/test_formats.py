"""Every format, every dimension: what goes in comes out as the codec says, and takes the bytes it should."""

from __future__ import annotations

import numpy as np
import pytest

from pion import limits
from pion._core import quant
from pion.errors import CommandError, MismatchError
from pion.limits import FORMATS
from pion.store.engine import Engine

from .model import F32
from .support import fetched, stored

DIMS = (1, 32, 33, 48, 64, 80, 96, 128, 192, 256, 512, 576, 1024, 2048, 4096)
ROW_FORMATS = tuple(limits.BUILT_FORMATS)


def _values(rows: int, dim: int) -> np.ndarray:
    return np.random.default_rng(rows + dim).standard_normal((rows, dim)).astype(np.float32)


def _predicted(name: str, dim: int) -> int:
    """Bytes of a row by the description of the format alone; 0 = refused."""
    groups = (dim + 31) // 32
    sizes = {
        "fp32": 4 * dim, "fp16": 2 * dim, "bf16": 2 * dim, "int8": dim + 4 * groups, "fp8": dim + 2 * groups,
        "mlx4g32": 0 if dim % 32 else dim // 2 + 4 * groups,
    }  # fmt: skip
    return sizes[name] if name in sizes else quant.row_bytes(FORMATS[name], dim)


@pytest.mark.parametrize("dim", DIMS)
def test_every_format_takes_the_predicted_bytes(engine: Engine, dim: int) -> None:
    total, rows = 0, 70
    values = _values(rows, dim)
    for name in ROW_FORMATS:
        fmt, size = FORMATS[name], _predicted(name, dim)
        sid = b"raw-" + name.encode()
        if not size:
            with pytest.raises(CommandError, match=f"format {name} takes rows of multiples of 32 values, not {dim}"):
                engine.v_create(sid, dim, fmt)
            with pytest.raises(CommandError, match=f"format {name} takes rows of multiples of 32 values, not {dim}"):
                engine.register(name.encode(), dim, fmt)
            assert not engine.v_exists(sid)
            continue
        engine.v_create(sid, dim, fmt)
        engine.v_store(sid, 0, 0, rows, values.data.cast("B"))
        sink = engine.v_store_open(sid, 0, rows, rows, values.nbytes)
        sink.feed(values)
        engine.v_store_finish(sink, "F32")
        kept = bytes(quant.encode(F32, fmt, values.tobytes(), dim))
        assert len(kept) == rows * size
        assert stored(engine, sid, 0, 0, 2 * rows) == 2 * kept
        assert fetched(engine, sid, 0, 2 * rows) == 2 * bytes(quant.decode(fmt, kept, dim))
        total += 2 * rows * size
        assert engine.info()["vstore_bytes"] == total


@pytest.mark.parametrize("name", ROW_FORMATS)
def test_chunks_do_not_matter(engine: Engine, name: str) -> None:
    rows, dim = 600, 96
    values = _values(rows, dim)
    seen = set()
    for chunk in (1, 3, 4, 255, 256, 257, rows):
        ns = b"ns%d" % chunk
        engine.register(ns, dim, FORMATS[name], head_dim=48, rope=1e4)
        for at in range(0, rows, chunk):
            part = values[at : at + chunk]
            engine.v_store(ns + b"_pv", 0, at, len(part), part.tobytes())
        got = fetched(engine, ns + b"_pv", 0, rows)
        assert engine.compact(ns)
        assert fetched(engine, ns + b"_pv", 0, rows) == got
        seen.add((got, stored(engine, ns + b"_pv", 0, 0, rows)))
    assert len(seen) == 1


@pytest.mark.parametrize("rope", [1, 31, 64])
def test_the_hybrid_by_schema(engine: Engine, rope: int) -> None:
    dim, fmt = rope + 64, FORMATS["bf16_rope_fp8_body"] | rope << 8
    values = _values(10, dim)
    engine.v_create(b"s", 0, 0, ((dim, fmt),))
    engine.v_store(b"s", 0, 0, 10, values.data.cast("B"))
    kept = bytes(quant.encode(F32, fmt, values.tobytes(), dim))
    assert len(kept) == 10 * (2 * rope + 64 + 4) == engine.info()["vstore_bytes"]
    assert fetched(engine, b"s", 0, 10) == bytes(quant.decode(fmt, kept, dim))
    engine.close()
    with Engine(engine.root, ticker=False) as again:
        assert again.v_info(b"s").layers == [(dim, fmt)]
        assert stored(again, b"s", 0, 0, 10) == kept
        with pytest.raises(MismatchError):
            again.v_create(b"s", 0, 0, ((dim, FORMATS["bf16_rope_fp8_body"] | rope + 32 << 8),))


@pytest.mark.parametrize("name", ["int8", "fp8", "mlx4g32", "turbo4", "turbo3", "turbo2"])
@pytest.mark.parametrize("value", [np.nan, np.inf, 70_000])
def test_c9_quantized_formats_refuse_what_they_cannot_hold(engine: Engine, name: str, value: float) -> None:
    values = _values(50, 64)
    values[33, 5] = value
    engine.register(b"ns", 64, FORMATS[name])
    for sid in (b"ns_pk", b"ns_pv"):
        with pytest.raises(CommandError, match=f"row 33 holds a value outside the range of {name}"):
            engine.v_store(sid, 0, 0, 50, values.data.cast("B"))
        assert engine.v_fetch_range(sid, 0, 0, 50) is None


def test_c10_k_and_v_keep_scales_of_their_own(engine: Engine) -> None:
    """fp8 keys of half the size and values of twice the size: every row comes back at its own scale."""
    values = _values(64, 128)
    engine.register(b"ns", 128, FORMATS["fp8"], rows=64, layers=1)
    for sid, scale in ((b"ns_pk", 0.5), (b"ns_pv", 2.0)):
        engine.v_store(sid, 0, 0, 64, (values * np.float32(scale)).data.cast("B"))
    for sid, scale in ((b"ns_pk", 0.5), (b"ns_pv", 2.0)):
        got = np.frombuffer(fetched(engine, sid, 0, 64), np.float32).reshape(64, 128) / scale
        assert np.linalg.norm(got - values) / np.linalg.norm(values) < 0.04
        assert abs(np.linalg.norm(got) / np.linalg.norm(values) - 1) < 0.01
