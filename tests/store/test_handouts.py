"""Tickets for entry files: which file they are good for, and how few descriptors they cost."""

from __future__ import annotations

import logging
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pion import limits
from pion._core import framing, stream
from pion.errors import TicketError
from pion.store import layout
from pion.store.caps import descriptor_cap
from pion.store.engine import Engine
from pion.store.index import Index
from pion.store.regular import Watch

from .support import fill


@pytest.fixture(params=["disk", "memory"])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Engine]:
    memory = request.param == "memory"
    with Engine(None if memory else tmp_path / "data", memory_only=memory, ticker=False) as engine:
        yield engine


def generation(fd: int) -> int:
    try:
        return framing.read_file_header(fd, type=layout.ENTRY_TYPE).generation
    finally:
        os.close(fd)


def test_a_ticket_is_for_one_file_whether_that_was_held_open_or_not(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    for ns in (b"a", b"b"):
        fill(engine, ns)
    monkeypatch.setattr(limits, "LANE_TICKET_FILES", 2)
    for opened, answers in ((True, True), (False, False)):
        plain, over = engine.lane(b"b"), engine.lane(b"a")
        if not opened:
            for _ in range(2):
                engine.lane(b"b")
        assert engine.compact(b"a")
        assert generation(engine.redeem(plain.ticket)) == plain.generation
        if answers:
            assert generation(engine.redeem(over.ticket)) == over.generation
        else:
            with pytest.raises(TicketError, match="written anew meanwhile: ask again"):
                engine.redeem(over.ticket)
        again = engine.lane(b"a")
        assert again.generation != over.generation
        assert generation(engine.redeem(again.ticket)) == again.generation


@pytest.mark.parametrize("damage", ["removed", "exchanged"])
def test_a_file_that_was_not_held_open_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    monkeypatch.setattr(limits, "LANE_TICKET_FILES", 1)
    with Engine(tmp_path, ticker=False) as engine:
        for ns in (b"a", b"b", b"c"):
            fill(engine, ns)
        old = engine.lane(b"a")
        for ns in (b"b", b"c"):
            engine.lane(ns)
        with engine._store.lock:
            for _ in range(3):
                engine._store.spare_descriptors()
        entries = {ns: tmp_path / engine._store.entries[layout.PREFIX + ns].path for ns in (b"a", b"b")}
        entries[b"a"].unlink()
        if damage == "exchanged":
            os.link(entries[b"b"], entries[b"a"])
        with pytest.raises(TicketError, match="the prefix is gone"):
            engine.redeem(old.ticket)


def lying(engine: Engine, ns: bytes) -> tuple[dict[tuple[int, int], bytes], dict[int, bytes]]:
    """What the file of an offer holds, where the offer says that it lies: rows by side and layer, states."""
    offer = engine.lane(ns)
    fd = engine.redeem(offer.ticket)
    try:
        rows = {
            (side, number): b"".join(os.pread(fd, nbytes, offset) for offset, nbytes in layer.pieces)
            for side, layers in enumerate(offer.contents.sides)
            for number, layer in enumerate(layers)
        }
        return rows, {number: os.pread(fd, nbytes, offset) for number, offset, nbytes in offer.contents.states}
    finally:
        os.close(fd)


def test_what_is_told_again_is_what_is_there_now(engine: Engine) -> None:
    first = fill(engine, b"a")
    rows = dict.fromkeys([(side, layer) for side in range(2) for layer in range(2)], first)
    assert lying(engine, b"a") == (rows, {})
    assert engine.lane(b"a").contents is engine.lane(b"a").contents  # looked at once
    other = bytes(reversed(first))
    engine.v_store(b"a_pv", 1, 0, 16, other, "F16")
    rows[1, 1] = other
    assert lying(engine, b"a") == (rows, {})
    engine.ssm_store(b"a", 3, b"a state")
    assert lying(engine, b"a") == (rows, {3: b"a state"})
    assert engine.compact(b"a")
    assert lying(engine, b"a") == (rows, {3: b"a state"})
    engine.ssm_drop(b"a", 3)
    assert lying(engine, b"a") == (rows, {})
    engine.drop(b"a")
    again = fill(engine, b"a", rows=8)
    assert lying(engine, b"a") == (dict.fromkeys(rows, again), {})
    engine._handouts.tick()
    assert len(engine._handouts._contents) == 1  # nothing of what is gone


@pytest.mark.skipif(sys.platform != "linux", reason="counts /proc/self/fd")
def test_a_thousand_tickets_leave_descriptors_for_everything_else(tmp_path: Path) -> None:
    """In a process of its own, whose descriptors are all known."""
    call = f"from {__name__} import a_thousand_tickets; a_thousand_tickets({str(tmp_path)!r})"
    done = subprocess.run([sys.executable, "-c", call], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def a_thousand_tickets(root: str) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with Engine(root, ticker=False) as engine:
        for number in range(300):
            fill(engine, b"p%d" % number, rows=1, layers=1)
        before = len(os.listdir("/proc/self/fd"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        with engine._store.lock:
            engine._store.opened(engine._store.entries[layout.PREFIX + b"p299"])  # down to the cap
        stream.drain()
        offers = []
        for number in range(1100):
            offer = engine.lane(b"p%d" % (number % 300))
            offers.append((offer.ticket, offer.generation))
        del offer  # it holds the file
        stream.drain()
        assert len(os.listdir("/proc/self/fd")) < before - 300 + 64 + 64 // 4 + 10
        fill(engine, b"new")
        engine.save()
        engine.save("copy")
        for ticket, wanted in offers[-limits.LANE_TICKETS :]:
            assert generation(engine.redeem(ticket)) == wanted
        stream.drain()
        assert len(os.listdir("/proc/self/fd")) < before - 300 + 64 + 64 // 2 + 10
        assert descriptor_cap() == 64


def test_an_index_that_was_written_anew_is_not_taken_for_a_damaged_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Inode numbers come back: the second rewrite's file often has that of the first."""
    with Engine(tmp_path, ticker=False) as engine, caplog.at_level(logging.ERROR):
        for number in range(8):
            fill(engine, b"p%d" % number, rows=1, layers=1)
        for _ in range(20):
            engine._upkeep._upkeep()
            for _ in range(3):
                engine._upkeep.rewrite_index()
                engine.lookup(b"p1")
        engine._upkeep._upkeep()
        assert caplog.text == ""
        assert isinstance(engine._store.index, Index)
        os.truncate(tmp_path / "pion.index", engine._store.index.size - 3)
        engine._upkeep._upkeep()
        assert "was cut to" in caplog.text


def test_a_watch_tells_a_file_in_the_place_of_another_from_one_that_was_overwritten(tmp_path: Path) -> None:
    """The new one may have the inode number of the old one."""
    path = tmp_path / "file"
    path.write_bytes(b"a" * 100)
    with path.open("r+b") as file:
        watch = Watch()
        assert watch.look(file.fileno(), 100, 1) == ""
        os.pwrite(file.fileno(), b"b" * 100, 0)
        assert watch.look(file.fileno(), 100, 2) == ""
        assert watch.look(file.fileno(), 100, 2) == ""
        os.pwrite(file.fileno(), b"c" * 100, 0)
        assert watch.look(file.fileno(), 100, 2) == "was cut or overwritten"
