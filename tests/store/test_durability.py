"""COMMIT, SAVE, appendfsync, and the index that is written beside the entries."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pion._core import stream, vstore
from pion.errors import StorageError
from pion.store import index, layout
from pion.store.engine import Engine

from .model import F16, words
from .support import DIM, crash, fetched, fill


@pytest.fixture
def flushes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Descriptors that were flushed, in order."""
    seen: list[int] = []
    original = vstore.flush

    def counted(fd: int) -> None:
        seen.append(fd)
        original(fd)

    monkeypatch.setattr(vstore, "flush", counted)
    return seen


def test_commit_flushes_each_dirty_entry_once(engine: Engine, flushes: list[int]) -> None:
    for i in range(10):
        fill(engine, b"p%d" % i)
    engine.commit()
    assert len(flushes) == len(set(flushes)) == 11  # and the index
    del flushes[:]
    engine.v_store(b"p3_pk", 0, 0, 1, words(1, 1, DIM, F16), "F16")
    engine.commit()
    assert len(flushes) == 2
    assert engine.info()["wal_bytes"] == 0


def test_waiters_share_a_commit(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever comes while one is running is covered by the next, whatever their number."""
    gate, entered, rounds = threading.Event(), threading.Event(), []
    original = engine._upkeep._flush_all

    def slow() -> None:
        rounds.append(1)
        entered.set()
        assert gate.wait(20)
        original()

    monkeypatch.setattr(engine._upkeep, "_flush_all", slow)
    fill(engine, b"ns")
    first = threading.Thread(target=engine.commit)
    first.start()
    assert entered.wait(20)
    engine.v_store(b"ns_pk", 0, 0, 1, words(1, 1, DIM, F16), "F16")
    others = [threading.Thread(target=engine.commit) for _ in range(20)]
    for thread in others:
        thread.start()
    gate.set()
    for thread in [first, *others]:
        thread.join()
    assert 2 <= len(rounds) <= 3  # a straggler may come when the second has begun
    assert engine.info()["wal_bytes"] == 0


def test_b3_a_failed_flush_is_told_to_everybody_and_never_forgotten(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(engine, b"ns")

    def broken(fd: int) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(vstore, "flush", broken)
        with pytest.raises(StorageError, match="a log could not be flushed"):
            engine.commit()
    with pytest.raises(StorageError, match="a log could not be flushed"):  # the pages may have been marked clean
        engine.commit()
    with pytest.raises(StorageError, match="SAVE failed"):
        engine.save()
    assert engine.info()["vstore_sync_failed"] == 1
    assert engine.lookup(b"ns")
    engine.close()
    with Engine(engine.root, ticker=False) as again:
        assert again.lookup(b"ns")
        again.commit()


def test_commit_goes_on_without_a_removed_file(engine: Engine) -> None:
    """Of an entry whose descriptor was given back: it goes out of service, and the others are flushed."""
    fill(engine, b"ns")
    fill(engine, b"other")
    with engine._store.lock:
        for _ in range(2):
            engine._store.spare_descriptors()
    assert engine.root is not None
    (engine.root / layout.entry_path(layout.PREFIX + b"ns")).unlink()
    engine.commit()
    assert engine.info()["wal_bytes"] == 0
    assert not engine.lookup(b"ns")
    assert engine.lookup(b"other")


def test_always_flushes_before_it_answers(tmp_path: Path, flushes: list[int]) -> None:
    with Engine(tmp_path / "d", appendfsync="always", ticker=False) as engine:
        calls: list[Callable[[], object]] = [
            lambda: engine.register(b"ns", DIM, F16),
            lambda: engine.v_store(b"ns_pk", 0, 0, 1, words(1, 1, DIM, F16), "F16"),
            lambda: engine.ssm_store(b"ns", 0, b"s"),
            lambda: engine.v_create(b"raw", DIM, F16),
            lambda: engine.drop(b"ns"),
        ]
        for call in calls:
            del flushes[:]
            call()
            assert flushes
            assert engine.info()["wal_bytes"] == 0
        engine.deferred_sync = True  # a server commits for all its clients at once
        del flushes[:]
        engine.register(b"ns", DIM, F16)
        assert not flushes
        assert engine.always


def test_a_tick_flushes_seals_and_remembers_uses(engine: Engine, tmp_path: Path) -> None:
    for i in range(3):
        fill(engine, b"p%d" % i)
    for _ in range(3):
        engine._upkeep._upkeep()
    assert engine.info()["wal_bytes"] == 0
    engine.lookup(b"p0")
    engine._upkeep._upkeep()
    crash(engine.root, tmp_path / "killed")
    with Engine(tmp_path / "killed", max_sessions=4, ticker=False) as again:
        assert again.info()["wal_replayed"] == 0  # sealed: nothing had to be read
        assert [again.lookup(b"p%d" % i) for i in range(3)] == [True, False, True]
    engine.v_store(b"p1_pk", 0, 0, 16, words(9, 16, DIM, F16), "F16")
    crash(engine.root, tmp_path / "killed2")
    with Engine(tmp_path / "killed2", ticker=False) as again:
        assert again.info()["wal_replayed"] == 1
        assert fetched(again, b"p1_pk", 0, 16, native=True) == words(9, 16, DIM, F16)


def test_ticks_come_by_themselves(tmp_path: Path) -> None:
    with Engine(tmp_path / "d") as engine:
        fill(engine, b"ns")
        done = threading.Event()
        original = engine._upkeep.commit
        engine._upkeep.commit = lambda: (original(), done.set())[0]  # type: ignore[method-assign, func-returns-value]
        assert done.wait(20)


def _power_cut(engine: Engine, to: Path, ns: bytes, torn: list[bytes], monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the directory in which 512 bytes of each of these payloads never reached the medium."""
    crash(engine.root, to)
    file = to / engine._store.entries[b"p" + ns].path
    data = bytearray(file.read_bytes())
    for payload in torn:
        at = data.index(payload)
        data[at : at + 512] = bytes(512)
    file.write_bytes(data)
    monkeypatch.setattr(index, "boot_id", lambda: b"another")
    return to


def test_a_power_cut_takes_only_what_was_not_flushed(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blob = fill(engine, b"ns")
    engine.commit()
    later = [words(seed, 16, DIM, F16) for seed in range(3)]
    for layer, rows in ((0, later[0]), (1, later[1]), (0, later[2])):
        engine.v_store(b"ns_pk", layer, 0, 16, rows, "F16")
    path = _power_cut(engine, tmp_path / "cut", b"ns", [later[1], later[2]], monkeypatch)
    with Engine(path, ticker=False) as again:
        assert again.info()["vstore_quarantined"] == 0
        assert again.lookup(b"ns")
        assert fetched(again, b"ns_pk", 0, 16, native=True) == later[0]
        assert fetched(again, b"ns_pk", 1, 16, native=True) == blob
        assert len(list((path / "quarantine").iterdir())) == 2


def test_damage_of_what_was_flushed_is_never_taken_for_a_power_cut(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.register(b"ns", DIM, F16)
    payloads = [words(seed, 16, DIM, F16) for seed in range(4)]
    for layer in range(3):
        engine.v_store(b"ns_pk", layer, 0, 16, payloads[layer], "F16")
    engine.commit()
    engine.v_store(b"ns_pk", 3, 0, 16, payloads[3], "F16")
    path = _power_cut(engine, tmp_path / "cut", b"ns", [payloads[1]], monkeypatch)
    with Engine(path, ticker=False) as again:
        assert again.info()["vstore_quarantined"] == 1
        assert not again.v_exists(b"ns_pk")


def test_a_header_that_never_reached_the_medium_ends_the_file(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blob = fill(engine, b"ns")
    engine.commit()
    size = engine._store.entries[b"pns"].size
    for seed in range(2):
        engine.v_store(b"ns_pk", 0, 0, 16, words(seed, 16, DIM, F16), "F16")
    path = _power_cut(engine, tmp_path / "cut", b"ns", [], monkeypatch)
    file = path / engine._store.entries[b"pns"].path
    with file.open("r+b") as out:
        out.seek(size)
        out.write(bytes(512))
    with Engine(path, ticker=False) as again:
        assert again.lookup(b"ns")
        assert fetched(again, b"ns_pk", 0, 16, native=True) == blob


def test_the_index_is_rewritten_while_the_store_is_used(engine: Engine, tmp_path: Path) -> None:
    """Nothing that happens during a rewrite is lost, whichever file it found first."""
    for i in range(600):
        engine.register(b"p%d" % i, 8, F16)
    stop = threading.Event()
    errors: list[BaseException] = []

    def work() -> None:
        try:
            i = 0
            while not stop.is_set():
                engine.drop(b"p%d" % (i % 600))
                engine.register(b"q%d" % (i % 50), 8, F16)
                engine.drop(b"q%d" % ((i + 25) % 50))
                i += 1
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    for _ in range(20):
        engine._upkeep.rewrite_index()
    stop.set()
    thread.join()
    assert not errors
    names = set(engine.list(count=10_000)[1])
    crash(engine.root, tmp_path / "killed")
    with Engine(tmp_path / "killed", ticker=False) as again:
        assert set(again.list(count=10_000)[1]) == names


def test_a_bloated_index_shrinks(engine: Engine) -> None:
    for _ in range(4000):
        engine.register(b"ns", 8, F16)
        engine.drop(b"ns")
    assert engine._store.index is not None
    assert engine._store.index.size > 256 * 1024
    engine._upkeep._upkeep()
    assert engine._store.index.size < 4096


@pytest.fixture
def few_descriptors() -> Iterator[None]:
    """Room for some hundred files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(int(name) for name in os.listdir("/dev/fd")) + 160, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("few_descriptors")
def test_commit_needs_few_descriptors(tmp_path: Path) -> None:
    """Entries are flushed in batches: hundreds can be dirty where not so many files may be open."""
    with Engine(tmp_path / "data", ticker=False) as engine:
        blob = fill(engine, b"p0")
        for i in range(1, 400):
            fill(engine, b"p%d" % i, layers=1)
        engine.commit()
        assert engine.info()["wal_bytes"] == 0
    stream.drain()  # its files are closed in the background
    with Engine(tmp_path / "data", ticker=False) as again:
        assert all(again.lookup(b"p%d" % i) for i in range(400))
        assert fetched(again, b"p0_pk", 0, 16, native=True) == blob


_FEW = """
import os, resource, sys
from pion.limits import FORMATS
from pion.store.engine import Engine

resource.setrlimit(resource.RLIMIT_NOFILE, (48, 48))
engine = Engine(sys.argv[1], ticker=False)
for i in range(100):
    if sys.argv[2] == "again":
        assert engine.lookup(b"p%d" % i), i
        continue
    engine.register(b"p%d" % i, 8, FORMATS["fp16"])
    for side in (b"_pk", b"_pv"):
        engine.v_store(b"p%d" % i + side, 0, 0, 1, bytes(16), "F16")
if sys.argv[2] == "commit":
    engine.commit()
os._exit(0)
"""


def test_a_process_of_48_descriptors(tmp_path: Path) -> None:
    """A flush, and a start after a kill, which opens what was dirty, leave descriptors for what comes after them."""
    for step in ("fill", "commit", "again"):
        done = subprocess.run([sys.executable, "-c", _FEW, tmp_path / "data", step], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


@pytest.mark.usefixtures("few_descriptors")
def test_a_commit_without_descriptors_is_put_off_not_lost(tmp_path: Path) -> None:
    """Nothing was flushed and nothing is lost: that one COMMIT is refused, the next one may succeed."""
    with Engine(tmp_path / "data", ticker=False) as engine:
        for i in range(8):
            fill(engine, b"p%d" % i)
        for entry in engine._store.entries.values():
            entry.ref = None  # as after many others were opened
        assert stream.drain(20)  # they are closed in the background
        taken = []
        try:
            while True:
                taken.append(os.open("/dev/null", os.O_RDONLY))
        except OSError:
            pass
        try:
            engine._store._open.clear()
            with pytest.raises(StorageError):
                engine.commit()
        finally:
            for fd in taken:
                os.close(fd)
        assert engine.info()["vstore_sync_failed"] == 0
        engine.commit()
        assert engine.info()["wal_bytes"] == 0
