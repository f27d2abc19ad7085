"""Full disks, limits, damage and kills."""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from pion._core import framing, stream
from pion.errors import CommandError, StorageError
from pion.store import files
from pion.store.engine import Engine

from .model import F16, words
from .support import DIM, crash, fetched, fill


def entry_file(engine: Engine, ns: bytes) -> Path:
    """Of a prefix."""
    assert engine.root is not None
    return engine.root / engine._store.entries[b"p" + ns].path


def records(path: Path) -> list[framing.Header]:
    """Of an entry file."""
    fd = os.open(path, os.O_RDONLY)
    try:
        header, _ = files.read_header(fd)
        return list(framing.Scanner(fd, header.size, header.seed))
    finally:
        os.close(fd)


def flip(path: Path, offset: int) -> None:
    """One bit."""
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 4]))


# --- no room -------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MB where mounting is possible, else a limit on the size of a file."""
    path = tmp_path / "disk"
    path.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", path], capture_output=True).returncode == 0:
        try:
            yield path
        finally:
            subprocess.run(["umount", "-l", path], check=True)
    else:
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (8 << 20, hard))
        try:
            yield path
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))


@pytest.mark.parametrize("streamed", [False, True])
def test_b7_a_full_disk_in_the_middle_of_a_store(small_disk: Path, streamed: bool) -> None:
    """An error, everything acknowledged before is intact, and it works again once there is room."""
    root = small_disk / "data"
    with Engine(root, max_bytes=1 << 30, ticker=False) as engine:
        blob = fill(engine, b"before", rows=512, layers=2)
        engine.register(b"full", DIM, F16, rows=100_000, layers=1)
        large = words(1, 100_000, DIM, F16)
        stored = 0

        def until_full() -> None:
            nonlocal stored
            while True:
                if streamed:
                    sink = engine.v_store_open(b"full_pk", 0, 0, 100_000, len(large))
                    sink.feed(large)
                    engine.v_store_finish(sink, "F16")
                else:
                    piece = large[stored * DIM * 2 : (stored + 2000) * DIM * 2]
                    engine.v_store(b"full_pk", 0, stored, 2000, piece, "F16")
                    stored += 2000

        with pytest.raises(StorageError, match=r"^ERR V.STOREBATCH failed: (No space left|File too large)"):
            until_full()
        assert not engine.lookup(b"full")
        assert engine.lookup(b"before")
        assert fetched(engine, b"before_pv", 1, 512, native=True) == blob
        if stored:
            assert fetched(engine, b"full_pk", 0, stored, native=True) == large[: stored * DIM * 2]
        else:
            assert engine.v_fetch_range(b"full_pk", 0, 0, 10) is None
        engine.drop(b"full")
        stream.drain()  # its blocks are freed in the background
        for number in range(3):
            fill(engine, b"after%d" % number, rows=256)
    with Engine(root, max_bytes=1 << 30, ticker=False) as again:
        assert [again.lookup(ns) for ns in (b"before", b"full", b"after0", b"after1", b"after2")] == [
            True, False, True, True, True,
        ]  # fmt: skip
        assert fetched(again, b"before_pv", 1, 512, native=True) == blob
        assert again.info()["vstore_quarantined"] == 0


def test_a_full_disk_cannot_keep_an_entry_from_being_dropped(small_disk: Path) -> None:
    root = small_disk / "data"
    with Engine(root, max_bytes=1 << 30, ticker=False) as engine:
        fill(engine, b"old", rows=512)
        number = 0
        with contextlib.suppress(StorageError):
            while number < 10_000:
                fill(engine, b"p%d" % number, rows=512)
                number += 1
        assert number < 10_000
        assert engine.drop(b"old") == 1
        assert not engine.lookup(b"old")
    with Engine(root, max_bytes=1 << 30, ticker=False) as again:
        assert not again.lookup(b"old")
        assert again.lookup(b"p0")


def test_a_write_that_fails_half_way_is_cut_off(engine: Engine) -> None:
    blob = fill(engine, b"ns", rows=64)
    size = entry_file(engine, b"ns").stat().st_size
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 1000, hard))
    try:
        with pytest.raises(StorageError, match="File too large"):
            engine.v_store(b"ns_pk", 0, 0, 64, words(5, 64, DIM, F16), "F16")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert entry_file(engine, b"ns").stat().st_size == size
    assert fetched(engine, b"ns_pk", 0, 64, native=True) == blob


# --- damage --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tail", [os.urandom(595), bytes(4096), b"\x7f" * 10])
def test_b1_bytes_behind_the_last_record(
    engine: Engine, tmp_path: Path, tail: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    blob = fill(engine, b"ns")
    path = crash(engine.root, tmp_path / "crashed")
    file = path / entry_file(engine, b"ns").relative_to(tmp_path / "data")
    with file.open("ab") as out:
        out.write(tail)
    with Engine(path, ticker=False) as again:
        assert f"cut {len(tail)} bytes" in caplog.text
        assert again.lookup(b"ns")
        assert fetched(again, b"ns_pk", 0, 16, native=True) == blob
        again.v_store(b"ns_pk", 0, 0, 16, words(3, 16, DIM, F16), "F16")
    (copy,) = (path / "quarantine").iterdir()
    assert copy.read_bytes() == tail
    with Engine(path, ticker=False) as again:
        assert fetched(again, b"ns_pk", 0, 16, native=True) == words(3, 16, DIM, F16)


def test_b1_a_flipped_bit_in_the_last_record(engine: Engine, tmp_path: Path) -> None:
    fill(engine, b"ns")
    path = crash(engine.root, tmp_path / "crashed")
    file = path / entry_file(engine, b"ns").relative_to(tmp_path / "data")
    last = records(file)[-1]
    flip(file, last.payload_offset + 10)
    with Engine(path, ticker=False) as again:
        assert not again.lookup(b"ns")
        assert again.v_info(b"ns_pv").rows == [16]
        assert again.info()["vstore_quarantined"] == 0
        fetched(again, b"ns_pk", 1, 16)
        assert again.v_fetch_range(b"ns_pv", 1, 0, 16) is None
    assert len(list((path / "quarantine").iterdir())) == 1


@pytest.mark.parametrize("where", ["payload", "header"])
@pytest.mark.parametrize("clean", [False, True])
def test_b1_a_flipped_bit_in_the_middle_is_quarantined(
    engine: Engine, tmp_path: Path, where: str, clean: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Never served, never skipped; the file is kept, named and counted, and the name can be used again."""
    fill(engine, b"ns")
    other = fill(engine, b"other", rows=8)
    if clean:
        engine.close()
    path = crash(engine.root, tmp_path / "crashed")
    file = path / entry_file(engine, b"ns").relative_to(tmp_path / "data")
    middle = records(file)[2]
    flip(file, middle.offset + 29 if where == "header" else middle.payload_offset + 10)
    with Engine(path, ticker=False) as again:
        answers = []
        for sid, layer in ((b"ns_pk", 0), (b"ns_pv", 0), (b"ns_pk", 1), (b"ns_pv", 1)):
            try:
                body = again.v_fetch_range(sid, layer, 0, 16, native=True)
                answers.append(body is not None and body.tobytes() == words(16, 16, DIM, F16))
            except CommandError:
                answers.append(False)
        assert not all(answers)
        assert not again.lookup(b"ns")
        assert "damaged" in again.why(b"ns")
        assert again.info()["vstore_quarantined"] == 1
        assert "damaged" in caplog.text
        assert "quarantine" in caplog.text
        assert len(list((path / "quarantine").iterdir())) == 1
        assert fetched(again, b"other_pk", 0, 8, native=True) == other
        fill(again, b"ns")
        assert again.lookup(b"ns")


def test_a_damaged_state_and_block_table_are_not_served(engine: Engine, tmp_path: Path) -> None:
    engine.register(b"ns", DIM, F16, blocks=(16, b"12345678" * 3))
    engine.ssm_store(b"ns", 0, b"state" * 10)
    engine.v_store(b"ns_pk", 0, 0, 1, words(1, 1, DIM, F16), "F16")
    engine.close()
    path = tmp_path / "data"
    file = path / engine._store.entries[b"pns"].path
    for header in records(file):
        if header.kind == 5:
            flip(file, header.payload_offset)
    with Engine(path, ticker=False) as again:
        with pytest.raises(CommandError, match="out of service"):
            again.ssm_fetch(b"ns", 0)
        assert again.blocks(b"ns") is None
        assert again.info()["vstore_quarantined"] == 1


@pytest.mark.parametrize("what", ["gone", "empty", "another", "newer"])
def test_a_file_that_is_not_the_entry_is_a_miss(engine: Engine, tmp_path: Path, what: str) -> None:
    fill(engine, b"ns")
    blob = fill(engine, b"other", rows=4)
    mine, theirs = entry_file(engine, b"ns"), entry_file(engine, b"other")
    engine.close()
    if what == "gone":
        mine.unlink()
    elif what == "empty":
        mine.write_bytes(b"")
    elif what == "another":
        mine.write_bytes(theirs.read_bytes())
    else:
        head = framing.pack_file_header(b"PENT", version=99, generation=7)
        mine.write_bytes(head + bytes(100))
    with Engine(tmp_path / "data", ticker=False) as again:
        assert not again.lookup(b"ns")
        assert fetched(again, b"other_pk", 0, 4, native=True) == blob
        fill(again, b"ns")
        assert again.lookup(b"ns")
        if what != "gone":
            assert len(list((tmp_path / "data/quarantine").iterdir())) == 1


@pytest.mark.parametrize("what", ["missing", "torn", "garbage", "zeros", "foreign", "bit"])
def test_b12_the_index_is_rebuilt_from_the_entries(engine: Engine, tmp_path: Path, what: str) -> None:
    blobs = {b"p%d" % i: fill(engine, b"p%d" % i, rows=i + 1, digest="ab") for i in range(20)}
    engine.drop(b"p3")
    assert stream.drain(10)
    before = engine.info()
    path = crash(engine.root, tmp_path / "crashed")
    index = path / "pion.index"
    data = index.read_bytes()
    if what == "missing":
        index.unlink()
    elif what == "torn":
        index.write_bytes(data[:-7])
    elif what in ("garbage", "zeros"):
        index.write_bytes(data[: len(data) // 2] + (os.urandom(100) if what == "garbage" else bytes(100)))
    elif what == "bit":
        flip(index, len(data) // 2)
    else:
        index.write_bytes(b"PIONVS01 and so on")
    with Engine(path, ticker=False) as again:
        for thread in again._threads:  # the directory is listed while the engine serves
            thread.join()
        after = again.info()
        assert after["vstore_listing"] == 0
        same = ("registered_prefixes", "total_prefix_tokens", "vstore_sessions", "vstore_bytes", "vstore_file_bytes")
        assert {name: after[name] for name in same} == {name: before[name] for name in same}
        for ns, blob in blobs.items():
            assert again.lookup(ns, digest="ab") == (ns != b"p3")
            if ns != b"p3":
                assert fetched(again, ns + b"_pv", 1, int(ns[1:]) + 1, native=True) == blob


def test_b5_a_dropped_entry_stays_dropped_although_its_file_is_still_there(engine: Engine, tmp_path: Path) -> None:
    """The process ended between the index record and the rename."""
    fill(engine, b"ns")
    file = entry_file(engine, b"ns")
    data = file.read_bytes()
    engine.drop(b"ns")
    path = crash(engine.root, tmp_path / "crashed")
    (path / file.relative_to(tmp_path / "data")).write_bytes(data)
    with Engine(path, ticker=False) as again:
        assert not again.lookup(b"ns")
        assert again.info()["registered_prefixes"] == 0
        again.register(b"ns", DIM, F16)
        assert again.v_fetch_range(b"ns_pk", 0, 0, 16) is None
    with Engine(path, ticker=False) as again:
        assert again.v_info(b"ns_pk").rows == []


def test_b5_register_in_another_format_has_only_the_new_rows(engine: Engine, tmp_path: Path) -> None:
    fill(engine, b"ns", rows=100)
    engine.register(b"ns", DIM, 8, replace=True)
    engine.v_store(b"ns_pk", 0, 0, 2, words(1, 2, DIM, 8))
    engine.save()
    path = crash(engine.root, tmp_path / "crashed")
    with Engine(path, ticker=False) as again:
        assert again.v_info(b"ns_pk").rows == [2]
        assert again.v_info(b"ns_pv").rows == []
        assert again.info()["vstore_bytes"] == 2 * DIM * 4


def test_unfinished_files_of_a_crash_are_removed(engine: Engine, tmp_path: Path) -> None:
    fill(engine, b"ns")
    file = entry_file(engine, b"ns")
    engine.close()
    left = [Path(f"{file}.compact"), file.with_name("00" * 20 + ".pion.new"), tmp_path / "data/kv/trash/0123"]
    for path in left:
        path.write_bytes(b"x" * 100)
        os.utime(path, (1, 1))
    with Engine(tmp_path / "data", ticker=False) as again:
        for thread in again._threads:
            thread.join()
        assert again.lookup(b"ns")
    stream.drain()
    assert not any(path.exists() for path in left)


def test_replace_of_an_entry_whose_file_was_removed(engine: Engine) -> None:
    fill(engine, b"ns")
    entry_file(engine, b"ns").unlink()
    engine.register(b"ns", 8, F16, replace=True)
    assert engine.v_info(b"ns_pk").dim == 8
    assert entry_file(engine, b"ns").exists()
