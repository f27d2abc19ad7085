"""Keys in key forms: groups of 64 rows, however they come, whatever ends the process."""

from __future__ import annotations

import itertools
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pion._core import quant, quantkeys, vstore
from pion._core.stream import Extents
from pion.errors import CommandError
from pion.limits import FORMATS
from pion.store import groups
from pion.store.engine import Engine

from .model import BF16, F16, F32
from .support import WORDS, crash

GROUP = 64
DIM, HEAD, THETA = 96, 48, 10_000.0
NAMES = ("turbo4", "turbo3", "turbo2")
TURBO4 = FORMATS["turbo4"]
CHUNKS = (1, 3, 4, 255, 256, 257)


def keys(rows: int, seed: int = 1, dim: int = DIM) -> np.ndarray:
    """fp16 keys with a large common offset in a few channels."""
    rng = np.random.default_rng(seed)
    offset = np.where(rng.random(dim) < 0.1, 40 * rng.standard_normal(dim), 0)
    return (rng.standard_normal((rows, dim)) + offset).astype(np.float16)


def key_form(name: str, head: int = HEAD) -> int:
    return (FORMATS[name] + 16) | head << 8


def coded(fmt: int, words: np.ndarray, first: int, theta: float = THETA) -> np.ndarray:
    """Whole groups as they come back."""
    dim = words.shape[1]
    blocks = quantkeys.encode_keys(F16, fmt, words.tobytes(), dim, first, theta)
    return np.frombuffer(quantkeys.decode_keys(fmt, blocks, dim, first, theta), np.float32).reshape(-1, dim)


def expected(fmt: int, words: np.ndarray, theta: float = THETA) -> np.ndarray:
    """A layer whose rows are all there."""
    whole = len(words) // GROUP * GROUP
    sealed = coded(fmt, words[:whole], 0, theta) if whole else np.empty((0, words.shape[1]), np.float32)
    return np.concatenate([sealed, words[whole:].astype(np.float32)])


def register(engine: Engine, ns: bytes = b"ns", fmt: int = TURBO4, dim: int = DIM, **options: object) -> None:
    engine.register(ns, dim, fmt, head_dim=HEAD, rope=THETA, **options)  # type: ignore[arg-type]


def put(engine: Engine, ns: bytes, start: int, words: np.ndarray, *, streamed: bool = False, source: int = F16) -> None:
    blob = words.tobytes() if source == F16 else bytes(quant.encode(F16, source, words.tobytes(), words.shape[1]))
    if not streamed:
        engine.v_store(ns + b"_pk", 0, start, len(words), blob, WORDS[source])
        return
    sink = engine.v_store_open(ns + b"_pk", 0, start, len(words), len(blob))
    for at in range(0, len(blob), 9999):
        sink.feed(blob[at : at + 9999])
    assert engine.v_store_heavy(sink, WORDS[source])
    engine.v_store_finish(sink, WORDS[source])


def rows_of(engine: Engine, ns: bytes, start: int, end: int, dim: int = DIM) -> np.ndarray | None:
    body = engine.v_fetch_range(ns + b"_pk", 0, start, end)
    return None if body is None else np.frombuffer(body.tobytes(), np.float32).reshape(end - start, dim)


def payload(engine: Engine, ns: bytes, rows: int) -> tuple[list[object], bytes]:
    found = engine.v_fetch_stored(ns + b"_pk", 0, 0, rows)
    assert found is not None
    return list(found.runs), Extents(found.segments).tobytes()


# --- chunks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("streamed", [False, True])
def test_any_chunks_give_the_same_rows_and_after_compaction_the_same_bytes(
    engine: Engine, name: str, streamed: bool
) -> None:
    rows, fmt = 700, key_form(name)
    words = keys(rows)
    want = expected(fmt, words)
    block = vstore.row_bytes(fmt, DIM) * GROUP
    seen = []
    for chunk in CHUNKS:
        ns = b"c%d" % chunk
        register(engine, ns, FORMATS[name])
        for at in range(0, rows, chunk):
            put(engine, ns, at, words[at : at + chunk], streamed=streamed and chunk > 64)
        got = rows_of(engine, ns, 0, rows)
        assert np.array_equal(got, want), chunk
        for start, end in ((0, 1), (63, 65), (100, 101), (64, 128), (130, 699), (639, 700), (690, 700)):
            assert np.array_equal(rows_of(engine, ns, start, end), want[start:end])
        about = engine.v_info(ns + b"_pk")
        assert (about.fmt, about.dim, about.layers) == (FORMATS[name], DIM, [(DIM, fmt)])
        assert engine.compact(ns)
        assert np.array_equal(rows_of(engine, ns, 0, rows), want)
        path = engine.root / engine._store.entries[b"p" + ns].path
        seen.append((payload(engine, ns, rows), path.stat().st_size))
    assert len(CHUNKS) * (700 // 64 * block + (700 % 64) * 2 * DIM) == engine.info()["vstore_bytes"]
    (runs, stored), _ = seen[0]
    assert [run[:4] for run in runs] == [(fmt, 0, 640, 10 * block), (F16, 640, 60, 60 * 2 * DIM)]
    assert (
        stored == bytes(quantkeys.encode_keys(F16, fmt, words[:640].tobytes(), DIM, 0, THETA)) + words[640:].tobytes()
    )
    assert all(other == seen[0] for other in seen)
    engine.close()
    with Engine(engine.root, ticker=False) as again:
        for chunk in CHUNKS:
            assert np.array_equal(rows_of(again, b"c%d" % chunk, 0, rows), want)
            assert payload(again, b"c%d" % chunk, rows) == seen[0][0]
        assert again.info()["vstore_bytes"] == len(CHUNKS) * (640 // 64 * block + 60 * 2 * DIM)


@pytest.mark.parametrize("source", [F32, F16, BF16])
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(("start", "count"), [(0, 640), (1, 640), (63, 66), (63, 129), (5, 20), (60, 8), (64, 64)])
def test_every_way_in(engine: Engine, source: int, streamed: bool, start: int, count: int) -> None:
    """Bodies that begin and end anywhere in a group; what is missing then comes later, before and behind."""
    words = keys(start + count + 70)
    if source == BF16:
        words = (np.round(words.astype(np.float32))).astype(np.float16)  # small whole numbers: exact in bf16
    register(engine)
    put(engine, b"ns", start, words[start : start + count], streamed=streamed, source=source)
    got = rows_of(engine, b"ns", 0, start + count)
    assert got is not None
    assert not got[:start].any()
    put(engine, b"ns", 0, words[:start]) if start else None
    put(engine, b"ns", start + count, words[start + count :])
    assert np.array_equal(rows_of(engine, b"ns", 0, len(words)), expected(key_form("turbo4"), words))


@pytest.mark.parametrize("dim", [1, 33, 80, 576, 8192])
def test_without_head_or_rope_any_row_goes(engine: Engine, dim: int) -> None:
    words = keys(130, dim=dim)
    engine.register(b"ns", dim, TURBO4, rows=130, layers=1)
    put(engine, b"ns", 0, words)
    assert np.array_equal(rows_of(engine, b"ns", 0, 130, dim), expected(key_form("turbo4", 0), words, 0.0))
    engine.v_store(b"ns_pv", 0, 0, 130, words.tobytes(), "F16")
    assert engine.lookup(b"ns")
    block = vstore.row_bytes(key_form("turbo4", 0), dim) * GROUP
    assert engine.info()["vstore_bytes"] == 2 * block + 2 * 2 * dim + 130 * quant.row_bytes(TURBO4, dim)


def test_values_and_raw_sessions_keep_the_row_form(engine: Engine) -> None:
    register(engine)
    words = keys(130)
    engine.v_create(b"raw", DIM, TURBO4)
    for sid, head in ((b"ns_pv", HEAD), (b"raw", 0)):
        fmt = TURBO4 | head << 8
        engine.v_store(sid, 0, 0, 130, words.tobytes(), "F16")
        found = engine.v_fetch_stored(sid, 0, 0, 130)
        assert found is not None
        assert [run.fmt for run in found.runs] == [fmt]
        assert Extents(found.segments).tobytes() == bytes(quant.encode(F16, fmt, words.tobytes(), DIM))


def test_single_rows_by_position(engine: Engine) -> None:
    words = keys(150)
    register(engine)
    put(engine, b"ns", 0, words)
    want = np.concatenate([expected(key_form("turbo4"), words), np.zeros((10, DIM), np.float32)])
    ids = [3, 4, 5, 149, 0, 127, 128, 63, 64, 155, 3]
    body = engine.v_fetch_ids(b"ns_pk", 0, ids)
    assert body is not None
    assert np.array_equal(np.frombuffer(body.tobytes(), np.float32).reshape(-1, DIM), want[ids])


# --- a random history ------------------------------------------------------------------------------------------------


class Model:
    """What the store must hold: words and sealed groups."""

    def __init__(self, fmt: int) -> None:
        self.fmt = fmt
        self.words: dict[int, np.ndarray] = {}
        self.sealed: set[int] = set()
        self.tokens = 0

    def group(self, number: int) -> np.ndarray:
        words = np.array([self.words[number * GROUP + i] for i in range(GROUP)])
        return coded(self.fmt, words, number * GROUP)

    def open(self, number: int) -> None:
        """A sealed group as rows again."""
        if number in self.sealed:
            for i, row in enumerate(self.group(number).astype(np.float16)):
                self.words[number * GROUP + i] = row
            self.sealed.discard(number)

    def store(self, start: int, words: np.ndarray) -> None:
        end = start + len(words)
        for number in range(start // GROUP, (end - 1) // GROUP + 1):
            first = number * GROUP
            if start > first or end < first + GROUP:
                self.open(number)
            for row in range(max(start, first), min(end, first + GROUP)):
                self.words[row] = words[row - start]
            if all(first + i in self.words for i in range(GROUP)):
                self.sealed.add(number)
        self.tokens = max(self.tokens, end)

    def cut(self, length: int) -> None:
        if length >= self.tokens:
            return
        if length % GROUP:
            self.open(length // GROUP)
        self.words = {row: words for row, words in self.words.items() if row < length}
        self.sealed = {number for number in self.sealed if (number + 1) * GROUP <= length}
        self.tokens = length

    def rows(self, end: int) -> np.ndarray:
        out = np.zeros((end, DIM), np.float32)
        for row, words in self.words.items():
            if row < end and row // GROUP not in self.sealed:
                out[row] = words
        for number in self.sealed:
            out[number * GROUP : (number + 1) * GROUP] = self.group(number)
        return out

    def check(self, engine: Engine) -> None:
        about = engine.v_info(b"ns_pk")
        assert about.rows == ([self.tokens] if about.rows else [])
        end = max(self.tokens, 1)
        got = rows_of(engine, b"ns", 0, end)
        if self.tokens:
            assert np.array_equal(got, self.rows(end))
        else:
            assert got is None
        entry = engine._store.entries[b"pns"]
        assert entry.rows is not None
        assert entry.rows.live(0, 0) == len(self.words)
        block = vstore.row_bytes(self.fmt, DIM) * GROUP
        size = self.tokens // GROUP * block + self.tokens % GROUP * 2 * DIM
        assert engine.info()["vstore_bytes"] == size == entry.nbytes


_store = st.tuples(st.just("store"), st.integers(0, 200), st.integers(1, 150), st.booleans())
_step = st.one_of(
    _store, _store, st.tuples(st.just("snap")), st.tuples(st.just("restore")), st.tuples(st.just("compact")),
    st.tuples(st.just("restart")), st.tuples(st.just("kill")),
)  # fmt: skip


@given(st.lists(_step, min_size=1, max_size=12), st.sampled_from(NAMES))
@settings(max_examples=40, deadline=None)
def test_a_random_history(tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[object, ...]], name: str) -> None:
    base = tmp_path_factory.mktemp("history")
    number = itertools.count()
    model = Model(key_form(name))
    engine = Engine(base / "first", ticker=False)
    register(engine, fmt=FORMATS[name])
    snaps: list[tuple[int, int]] = []
    try:
        for seed, (what, *values) in enumerate(steps):
            if what == "store":
                start, count, streamed = values
                words = keys(count, seed)  # type: ignore[arg-type]
                put(engine, b"ns", start, words, streamed=streamed)  # type: ignore[arg-type]
                model.store(start, words)  # type: ignore[arg-type]
            elif what == "snap":
                snaps.append((engine.v_snapshot(b"ns_pk"), model.tokens))
            elif what == "restore" and snaps:
                snap, length = snaps[-1]
                engine.v_restore(b"ns_pk", snap)
                model.cut(length)
            elif what == "compact":
                assert engine.compact(b"ns")
            elif what in ("restart", "kill"):
                root = engine.root
                assert root is not None
                if what == "kill":
                    root = crash(root, base / f"killed{next(number)}")
                engine.close()
                engine, snaps = Engine(root, ticker=False), []
            model.check(engine)
    finally:
        engine.close()


# --- refusals and errors ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("row", [0, 70, 150, 199])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 70_000])
def test_what_does_not_fit_is_refused_with_its_row(engine: Engine, streamed: bool, row: int, value: float) -> None:
    """In the rows before the first whole group, in one, and behind the last."""
    register(engine)
    put(engine, b"ns", 0, keys(10))
    size = engine.info()["vstore_file_bytes"]
    values = keys(200).astype(np.float32)
    values[row, 7] = value
    with pytest.raises(CommandError, match=rf"row {row} holds a value outside the range of turbo4"):
        if streamed:
            sink = engine.v_store_open(b"ns_pk", 0, 10, 200, values.nbytes)
            sink.feed(values)
            engine.v_store_finish(sink, "F32")
        else:
            engine.v_store(b"ns_pk", 0, 10, 200, values.data.cast("B"))
    assert engine.v_info(b"ns_pk").rows == [10]
    assert engine.info()["vstore_file_bytes"] == size


def test_rows_near_the_end_of_fp16_survive_a_cut(engine: Engine) -> None:
    """Decoding may leave the range of fp16 by a little; rows that become loose again are brought back into it."""
    words = (np.random.default_rng(2).uniform(65000, 65504, (64, DIM)) * np.where(np.arange(DIM) % 2, 1, -1)).astype(
        np.float16
    )
    engine.register(b"ns", DIM, TURBO4)
    put(engine, b"ns", 0, words[:40])
    snap = engine.v_snapshot(b"ns_pk")
    put(engine, b"ns", 40, words[40:])
    engine.v_restore(b"ns_pk", snap)
    got = rows_of(engine, b"ns", 0, 40)
    assert got is not None
    assert np.abs(got).max() <= 65504
    assert np.abs(got - words[:40]).max() < 0.1 * 65504


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("start", "count", "row"), [(0, 5, 3), (100, 300, 1), (100, 300, 200), (100, 300, 299), (63, 1, 0)]
)
def test_rows_that_are_too_large_before_their_rotation(
    engine: Engine, streamed: bool, start: int, count: int, row: int
) -> None:
    """They are refused when they come, whole group or not, and nothing that was there suffers."""
    held = keys(64)
    register(engine)
    put(engine, b"ns", 0, held[:63])
    put(engine, b"ns", 64, held[:36])
    words = keys(count)
    words[row] = 65000  # pairs of 65000, turned back by an angle of their own: some go beyond 65504
    with pytest.raises(CommandError, match=rf"row {row} holds a value outside the range of turbo4"):
        put(engine, b"ns", start, words, streamed=streamed)
    assert engine.v_info(b"ns_pk").rows == [100]
    got = rows_of(engine, b"ns", 0, 100)
    assert got is not None
    assert np.array_equal(got[:63], held[:63].astype(np.float32))
    assert np.array_equal(got[64:], held[:36].astype(np.float32))


def test_a_cut_that_a_crash_interrupts_changes_nothing(engine: Engine, tmp_path: Path) -> None:
    """The rows to keep are written before the cut: until it is written, the sealed group counts."""
    words = keys(128)
    register(engine, rows=128, layers=1)
    put(engine, b"ns", 0, words)
    engine.v_store(b"ns_pv", 0, 0, 128, words.tobytes(), "F16")
    store = engine._store
    with store.lock:
        groups.before_cut(store, store.entries[b"pns"], 0, 0, 100)
    want = expected(key_form("turbo4"), words)
    with Engine(crash(engine.root, tmp_path / "killed"), ticker=False) as killed:
        for open_engine in (engine, killed):
            assert open_engine.lookup(b"ns"), open_engine.why(b"ns")
            assert np.array_equal(rows_of(open_engine, b"ns", 0, 128), want)
        assert killed.compact(b"ns")
        assert np.array_equal(rows_of(killed, b"ns", 0, 128), want)
        assert payload(killed, b"ns", 128)[0] == [
            (key_form("turbo4"), 0, 128, 2 * 64 * vstore.row_bytes(key_form("turbo4"), DIM), False)
        ]


def test_a_partial_prefix_is_no_hit(engine: Engine) -> None:
    words = keys(100)
    register(engine, rows=100, layers=1)
    engine.v_store(b"ns_pv", 0, 0, 100, words.tobytes(), "F16")
    for start, end in ((0, 63), (64, 100)):
        put(engine, b"ns", start, words[start:end])
        assert not engine.lookup(b"ns")
        with pytest.raises(CommandError, match="declared"):
            engine.v_fetch_range(b"ns_pk", 0, 0, 100)
    put(engine, b"ns", 63, words[63:64])
    assert engine.lookup(b"ns")
    assert np.array_equal(rows_of(engine, b"ns", 0, 100), expected(key_form("turbo4"), words))


def test_head_size_and_rope_may_come_before_the_rows_only(engine: Engine) -> None:
    """They decide the stored bytes, so they are fixed with the first row; a body under way notices."""
    engine.v_create(b"ns_pk", DIM, TURBO4)
    assert engine.v_info(b"ns_pk").layers == []
    words = keys(64)
    sink = engine.v_store_open(b"ns_pk", 0, 0, 64, words.nbytes)
    sink.feed(words)
    register(engine)
    with pytest.raises(CommandError, match="described anew"):
        engine.v_store_finish(sink, "F16")
    put(engine, b"ns", 0, words)
    assert np.array_equal(rows_of(engine, b"ns", 0, 64), expected(key_form("turbo4"), words))
    register(engine)
    with pytest.raises(CommandError, match="MISMATCH"):
        engine.register(b"ns", DIM, TURBO4, head_dim=HEAD, rope=500.0)
    with pytest.raises(CommandError, match="MISMATCH"):
        engine.register(b"ns", DIM, FORMATS["turbo3"])


# --- kill -9 ---------------------------------------------------------------------------------------------------------

_CHILD = """
import os, sys
import numpy as np
from pion.store.engine import Engine
from tests.store.test_groups import keys, put, register
rng = np.random.default_rng(int(sys.argv[2]))
words = keys(4000)
engine = Engine(sys.argv[1])
register(engine)
at = 0
while at < len(words):
    count = int(rng.choice([1, 3, 4, 30, 64, 200, 257]))
    put(engine, b"ns", at, words[at : at + count], streamed=count > 64 and bool(rng.integers(2)))
    at = min(len(words), at + count)
    if rng.integers(20) == 0:
        engine.compact(b"ns")
    os.write(1, b"%d\\n" % at)
"""


def test_kill_9_loses_no_acknowledged_row(tmp_path: Path) -> None:
    words = keys(4000)
    sealed, loose = coded(key_form("turbo4"), words[: 62 * 64], 0), words.astype(np.float32)
    rng = np.random.default_rng(3)
    for seed in range(5):
        root = tmp_path / str(seed)
        child = subprocess.Popen(
            [sys.executable, "-c", _CHILD, str(root), str(seed)], stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]
        )
        assert child.stdout is not None
        said = b"".join(child.stdout.readline() for _ in range(int(rng.integers(3, 60))))
        child.send_signal(signal.SIGKILL)
        acked = int((said + child.stdout.read()).split(b"\n")[-2])
        child.wait()
        child.stdout.close()
        with Engine(root, ticker=False) as engine:
            assert engine.info()["vstore_quarantined"] == 0
            assert engine.v_info(b"ns_pk").rows[0] >= acked
            got = rows_of(engine, b"ns", 0, acked)
            whole = acked // GROUP * GROUP
            assert got is not None
            assert np.array_equal(got[:whole], sealed[:whole])
            tail = got[whole:]
            assert np.array_equal(tail, loose[whole:acked]) or np.array_equal(tail, sealed[whole:acked])
