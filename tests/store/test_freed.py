"""Blocks of removed files count until they are free: who needs them waits, and nobody else goes for it."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pion._core import stream
from pion.errors import OutOfMemoryError
from pion.limits import FORMATS
from pion.store import claims, files
from pion.store.engine import Engine
from pion.store.entries import SessionNotFoundError

from .model import F16, words
from .support import DIM, fetched, fill

CAP = 1 << 20
TURBO4 = FORMATS["turbo4"]
ROWS = 512
BLOB = words(7, ROWS, DIM, F16)  # 64 KiB


class HeldUnlinks:
    """Unlinks that are done when the test says so."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Path, stream.Room | None, stream.FdRef]] = []
        self.always = False  # says so of all that come

    def __call__(self, path: Path, room: stream.Room | None = None) -> None:
        if self.always:
            stream.unlink_later(path, room)
            return
        holder = stream.FdRef(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))  # has the room as the unlink would
        if room is not None:
            holder.occupy(room)
        self.waiting.append((path, room, holder))

    def let_go(self) -> None:
        while self.waiting:
            path, room, _ = self.waiting.pop()
            stream.unlink_later(path, room)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[HeldUnlinks]:
    unlinks = HeldUnlinks()
    with monkeypatch.context() as patch:
        patch.setattr(files, "stream", SimpleNamespace(unlink_later=unlinks, Room=stream.Room))
        yield unlinks
    unlinks.let_go()


def open_engine(tmp_path: Path, **options: Any) -> Engine:
    return Engine(tmp_path / "d", max_bytes=CAP, appendfsync="no", ticker=False, **options)


def left(engine: Engine) -> int:
    return CAP - engine.info()["vstore_file_bytes"]


def full(engine: Engine) -> list[bytes]:
    """Entries of one record each, until no further one fits."""
    names: list[bytes] = []
    while left(engine) > len(BLOB) + 16384:
        names.append(b"ns%d" % len(names))
        engine.register(names[-1], DIM, F16)
        engine.v_store(names[-1] + b"_pk", 0, 0, ROWS, BLOB, "F16")
    return names


def later(act: Callable[[], Any]) -> Future[Any]:
    pool = ThreadPoolExecutor(1)
    future = pool.submit(act)
    pool.shutdown(wait=False)
    return future


def used(root: Path) -> int:
    """Bytes of the blocks that entries take, removed ones included."""
    total = 0
    for folder, _, names in os.walk(root / "kv"):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += os.stat(os.path.join(folder, name)).st_blocks * 512
    return total


@pytest.mark.parametrize("how", ["drop", "evict"])
def test_b11_a_write_waits_for_blocks_that_are_being_freed(tmp_path: Path, held: HeldUnlinks, how: str) -> None:
    with open_engine(tmp_path) as engine:
        names = full(engine)
        state = bytes(left(engine) + 1)
        if how == "drop":
            engine.drop(names[3])
        writing = later(lambda: engine.ssm_store(names[-1], 0, state))
        time.sleep(0.3)
        assert not writing.done()
        assert len(held.waiting) == 1
        assert used(tmp_path / "d") <= CAP
        assert engine.info()["vstore_file_bytes"] <= CAP
        assert engine.info()["vstore_evicted"] == (how == "evict")
        held.let_go()
        writing.result(10)
        assert engine.info()["vstore_evicted"] == (how == "evict")
        gone = names[3] if how == "drop" else names[0]
        assert [name for name in names if b"p" + name not in engine._store.entries] == [gone]


def test_b11_what_is_never_freed_refuses_the_write(
    tmp_path: Path, held: HeldUnlinks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "ROOM_PATIENCE", 0.5)
    with open_engine(tmp_path) as engine:
        names = full(engine)
        state = bytes(left(engine) + 1)
        engine.drop(names[3])
        with pytest.raises(OutOfMemoryError, match="not freed yet"):
            engine.ssm_store(names[-1], 0, state)
        held.let_go()
        engine.ssm_store(names[-1], 0, state)


def test_b11_what_the_last_process_was_removing_counts(tmp_path: Path, held: HeldUnlinks) -> None:
    with open_engine(tmp_path) as engine:
        names = full(engine)
        for name in names[:4]:
            engine.drop(name)
        before = used(tmp_path / "d")
    held.waiting.clear()
    with open_engine(tmp_path) as engine:
        assert engine.info()["vstore_file_bytes"] >= before - 8192
        held.let_go()
        stream.drain()
        assert engine.info()["vstore_file_bytes"] == used(tmp_path / "d") < before - 3 * len(BLOB)


def test_b11_a_body_that_has_arrived_waits_too(tmp_path: Path, held: HeldUnlinks) -> None:
    """Overtaken bodies move behind what overtook them; those of key forms are encoded first, and only once."""
    with open_engine(tmp_path) as engine:
        engine.register(b"mine", DIM, TURBO4)
        sinks = [engine.v_store_open(b"mine_pk", 0, 0, ROWS, len(BLOB)) for _ in range(2)]
        for sink in sinks:
            sink.feed(BLOB)
        engine.v_store_finish(sinks.pop(), "F16")
        want = fetched(engine, b"mine_pk", 0, ROWS)
        names = full(engine)
        engine.drop(names[3])
        finishing = later(lambda: engine.v_store_finish(sinks.pop(), "F16"))
        time.sleep(0.3)
        assert not finishing.done()
        held.let_go()
        finishing.result(10)
        assert fetched(engine, b"mine_pk", 0, ROWS) == want


class SlowUnlinks:
    """Each takes a while, one after the other."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._pool = ThreadPoolExecutor(1)

    def __call__(self, path: Path, room: stream.Room | None = None) -> None:
        holder = stream.FdRef(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        if room is not None:
            holder.occupy(room)
        self._pool.submit(self._unlink, path, [holder])

    def _unlink(self, path: Path, holder: list[stream.FdRef]) -> None:
        time.sleep(self._seconds)
        path.unlink()
        holder.clear()


def test_b11_who_waits_for_room_gets_it_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many more writers than fit at a time, and a file system that is slow: nobody is refused."""
    unlinks = SlowUnlinks(0.01)
    monkeypatch.setattr(files, "stream", SimpleNamespace(unlink_later=unlinks, Room=stream.Room))
    waits: list[float] = []
    with open_engine(tmp_path) as engine:

        def write(number: int) -> None:
            for turn in range(4):
                name = b"w%d.%d" % (number, turn)
                began = time.monotonic()
                with contextlib.suppress(SessionNotFoundError):  # evicted between the two
                    engine.register(name, DIM, F16)
                    engine.v_store(name + b"_pk", 0, 0, ROWS, BLOB, "F16")
                waits.append(time.monotonic() - began)

        with ThreadPoolExecutor(100) as pool:
            list(pool.map(write, range(100)))
        assert not engine._store.claims
        assert all(not entry.waiting for entry in engine._store.entries.values())
    assert len(waits) == 400


def test_b11_who_waits_does_not_keep_the_room_from_others(tmp_path: Path, held: HeldUnlinks) -> None:
    """Each of three has more to write than is left; the first to be evicted is not enough for all of them."""
    with open_engine(tmp_path) as engine:
        sizes = {b"x": 100, b"a": 50, b"c": 400, b"b": 50}
        for name, kib in sizes.items():
            engine.ssm_store(name, 0, bytes(kib << 10))
        engine.ssm_store(b"x", 1, bytes((left(engine) - 3 * 8192) & ~4095))
        for name in (b"a", b"c", b"b"):
            engine.lookup(name)
        engine.pin(b"b")
        state = bytes(left(engine) + 4096)
        writing = {name: later(partial(engine.ssm_store, name, 1, state)) for name in (b"a", b"c", b"b")}
        time.sleep(0.3)
        assert not any(future.done() for future in writing.values())
        held.always = True
        held.let_go()
        for future in writing.values():
            with contextlib.suppress(SessionNotFoundError):
                future.result(10)


@pytest.mark.skipif(sys.platform != "linux", reason="cannot be told there")
def test_b11_a_mapped_entry_goes_for_a_slot_not_for_room(tmp_path: Path) -> None:
    with open_engine(tmp_path, max_sessions=12) as engine:
        blob = fill(engine, b"mapped")
        fd = engine.redeem(engine.lane(b"mapped").ticket)
        for number in range(4):
            engine.ssm_store(b"s%d" % number, 0, bytes(300 << 10))
        assert b"pmapped" in engine._store.entries
        assert engine.info()["vstore_evicted"] >= 1
        for number in range(12):
            engine.ssm_store(b"t%d" % number, 0, b"state")
        assert b"pmapped" not in engine._store.entries
        assert blob[:64] in os.pread(fd, 1 << 20, 0)
        os.close(fd)


@pytest.mark.skipif(sys.platform != "linux", reason="cannot be told there")
@pytest.mark.parametrize("memory", [False, True])
def test_b11_a_client_that_has_closed_holds_nothing(tmp_path: Path, memory: bool) -> None:
    with Engine(None if memory else tmp_path / "d", memory_only=memory, max_bytes=CAP, ticker=False) as engine:
        fill(engine, b"mapped")
        store, entry = engine._store, engine._store.entries[b"pmapped"]
        fd = engine.redeem(engine.lane(b"mapped").ticket)
        assert store.is_lent(entry)
        if not memory:
            store.spare_descriptors()
            assert fetched(engine, b"mapped_pk", 0, 4)
        os.close(fd)
        assert not store.is_lent(entry)
        engine.drop(b"mapped")
        assert stream.drain(10)
        assert left(engine) == CAP


def test_b11_blocks_on_the_disk_stay_below_the_cap(tmp_path: Path) -> None:
    """Twenty writers under it; what is flushed takes the file system longest to free."""
    root, over, end = tmp_path / "d", [0], time.monotonic() + 4
    with open_engine(tmp_path) as engine:

        def write(number: int) -> int:
            done = 0
            while time.monotonic() < end:
                name = b"w%d.%d" % (number, done)
                with contextlib.suppress(SessionNotFoundError):  # evicted between the two
                    engine.register(name, DIM, F16)
                    engine.v_store(name + b"_pk", 0, 0, ROWS, BLOB, "F16")
                    done += 1
                    if done % 4 == 0:
                        engine.commit()
            return done

        def watch() -> None:
            while time.monotonic() < end:
                with engine._store.lock:  # nobody writes
                    over[0] = max(over[0], used(root) - CAP)
                time.sleep(0.002)

        watching = threading.Thread(target=watch)
        watching.start()
        with ThreadPoolExecutor(20) as pool:
            assert all(pool.map(write, range(20)))
        watching.join()
    assert over[0] <= 0
