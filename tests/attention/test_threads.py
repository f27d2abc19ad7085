"""Many threads on one engine: stores, drops and queries of every kind. And memory that is given back."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref
from typing import Any

import numpy as np
import pytest

from pion.attention.engine import AttentionEngine
from pion.errors import AttentionMissError, ColdMissError
from tests.support import models
from tests.support.attention import backend, normal

BACKENDS = ("cpu", "mlx", "twins", pytest.param("metal", marks=pytest.mark.slow))
ROWS, DIM = 40, 16
Q, HEADS = normal(3, 2, 1, DIM), np.arange(2)


def engine_on(name: str, **options: Any) -> AttentionEngine:
    made = AttentionEngine(backend="cpu", **options)
    made.backend = backend(name, False)
    return made


def version(number: int) -> tuple[Any, Any]:
    """K/V of another length for each number, over which every answer is the number."""
    rows = ROWS + number % 7
    return normal(number, 2, rows, DIM), np.full((2, rows, DIM), number, np.float32)


def asked(engine: AttentionEngine) -> list[Any]:
    """Every kind of query; the values of suffixes would show, so they are far away."""
    far = np.full((2, 1, DIM), -1e9, np.float32) * np.sign(Q)
    picked = np.tile(np.arange(20, dtype=np.int32), (2, 1))
    return [
        lambda: engine.query(b"s", 0, Q)[0],
        lambda: engine.query(b"s", 0, Q, window=9)[0],
        lambda: engine.query_fused(b"s", 0, Q, far, far, HEADS),
        lambda: engine.query_sparse(b"s", 0, Q[:, 0], picked, np.array([20, 20]))[0],
        lambda: engine.query_sparse_auto(b"s", 0, Q[:, 0], 8, 2, 2, HEADS)[0],
        lambda: engine.query_sparse_auto(b"s", 0, Q[:, 0], 8, 99, 2, HEADS, selector="quest")[0],
        lambda: engine.query_sparse_auto(b"s", 0, Q[:, 0], 5, 1, 2, HEADS, k_suf=far, v_suf=far, selector="quest")[0],
    ]


@pytest.mark.parametrize("name", BACKENDS)
def test_every_answer_is_of_one_store_and_never_of_an_older_one(name: str) -> None:
    engine = engine_on(name, warm_slots=3)
    stored = 0  # the last number whose store has ended
    wrong: list[Any] = []
    answers = 0
    stop = threading.Event()

    def ask(start: int) -> None:
        nonlocal answers
        calls = asked(engine)
        turn = start
        while not stop.is_set():
            turn += 1
            oldest = stored
            try:
                out = calls[turn % len(calls)]()
            except (ColdMissError, AttentionMissError):
                continue
            except Exception as error:
                wrong.append(error)
                return
            answers += 1
            number = round(float(out.flat[0]))
            if np.abs(out - number).max() > 1e-4 * max(1, number) or number < oldest:
                wrong.append((turn % len(calls), oldest, out))

    threads = [threading.Thread(target=ask, args=(start,)) for start in range(4)]
    for thread in threads:
        thread.start()
    number = 0
    while number < 60 or (answers < 60 and not wrong and number < 100_000):
        number += 1
        engine.store(b"s", 0, *version(number))
        stored = number
        if number % 5 == 0:
            engine.drop(b"s")
        for other in range(number % 4):  # now and then it goes cold
            engine.store(b"other", other, *version(1))
    stop.set()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert not wrong
    assert answers >= 60
    engine.drop(b"s")
    engine.drop(b"other")
    assert (engine.info()["sdpa_warm"], engine.info()["sdpa_warm_bytes"]) == (0, 0)


def test_what_is_dropped_demoted_or_replaced_is_freed() -> None:
    engine = AttentionEngine(backend="cpu", warm_slots=2)

    def watched(layer: int) -> Any:
        engine.store(b"s", layer, *version(layer))
        engine.query_sparse_auto(b"s", layer, Q[:, 0], 8, 2, 2, HEADS)
        found = engine.slots._warm[b"s", layer]
        return [weakref.ref(array) for array in (found.held.keys, found.held.values, *found.tables[8, "block_mean"])]

    first, second = watched(0), watched(1)
    third = watched(2)
    gc.collect()
    assert [ref() is None for ref in (*first, *second, *third)] == [True] * 3 + [False] * 6
    engine.store(b"s", 1, *version(9))
    engine.drop(b"s")
    gc.collect()
    assert all(ref() is None for ref in (*second, *third))


@pytest.mark.parametrize("name", ["mlx", "twins"])
def test_memory_of_mlx_is_given_back(name: str) -> None:
    """Also by its allocator, which keeps what is freed up to a limit."""
    engine = engine_on(name)
    mx = models.mx
    gc.collect()
    before = mx.get_active_memory()
    k = np.zeros((4, 4000, 128), np.float32)
    for layer in range(4):
        engine.store(b"s", layer, k, k)
    assert mx.get_active_memory() - before >= 8 * k.nbytes
    engine.drop(b"s")
    gc.collect()
    assert mx.get_active_memory() - before < k.nbytes
    assert mx.get_cache_memory() <= 256 << 20


@pytest.mark.parametrize("mode", ["mlx", "twins"])
def test_a_backend_never_loads_mlx_lm(mode: str) -> None:
    """It lowers the limit of open files when it is imported."""
    make = "make('mlx', False)" if mode == "mlx" else "metal_ops.MetalBackend(how='ops')"
    code = f"""
import resource, sys
before = resource.getrlimit(resource.RLIMIT_NOFILE)
import numpy as np
from pion.attention import engine as module
from pion.attention.backends import make
from pion.attention import metal_ops
made = module.AttentionEngine(backend="cpu")
made.backend = {make}
k = np.ones((2, 9, 16), np.float32)
made.store(b"s", 0, k, k)
for call in (made.query(b"s", 0, k[:, :1]), made.query_sparse_auto(b"s", 0, k[:, 0], 2, 1, 2, np.arange(2))):
    assert np.allclose(call[0], 1)
assert "mlx.core" in sys.modules
assert not [name for name in sys.modules if name.startswith("mlx_lm")]
assert resource.getrlimit(resource.RLIMIT_NOFILE) == before
"""
    models.need_mlx()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
