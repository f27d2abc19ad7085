"""Sessions and bytes are capped, at any moment."""

from __future__ import annotations

import random
import threading
from pathlib import Path

import pytest

from pion import limits
from pion._core import stream
from pion.errors import CommandError, OutOfMemoryError
from pion.store import compact, startup
from pion.store.engine import Engine
from pion.store.entries import SessionNotFoundError

from .model import F16, words
from .support import DIM, fetched, fill


def test_256_sessions_behave_as_published(tmp_path: Path) -> None:
    with Engine(tmp_path / "d", max_sessions=8, ticker=False) as engine:
        for i in range(4):
            engine.register(b"p%d" % i, 8, F16)
        engine.v_fetch_range(b"p0_pv", 0, 0, 1)  # one side is enough to refresh both
        for i in range(4, 8):
            engine.register(b"p%d" % i, 8, F16)
        assert engine.info()["vstore_evictions"] == 8
        assert engine.info()["vstore_sessions"] == 8
        assert [engine.lookup(b"p%d" % i) for i in range(8)] == [False] * 4 + [True] * 4
        engine.v_create(b"raw", 8, F16)
        assert engine.info()["vstore_sessions"] == 7
        assert engine.why(b"p4").startswith("evicted")
    with pytest.raises(CommandError, match="no free V-store slots"), Engine(tmp_path / "e", max_sessions=1) as small:
        small.register(b"ns", 8, F16)


def test_lineage_leaves_go_first(tmp_path: Path) -> None:
    with Engine(tmp_path / "d", max_sessions=6, ticker=False) as engine:
        engine.register(b"root", 8, F16)
        engine.register(b"other", 8, F16)
        engine.register(b"leaf", 8, F16, parent=b"root")
        engine.register(b"new1", 8, F16)
        assert not engine.lookup(b"other")
        engine.register(b"new2", 8, F16)
        assert [engine.lookup(ns) for ns in (b"root", b"leaf")] == [True, False]


def test_b11_bytes_are_capped_and_stay_capped_at_start(tmp_path: Path) -> None:
    cap = 2 << 20
    with Engine(tmp_path / "d", max_bytes=cap, ticker=False) as engine:
        for i in range(40):
            fill(engine, b"p%d" % i, rows=256, layers=2)
            assert engine.info()["vstore_file_bytes"] <= cap
        on_disk = sum(path.stat().st_blocks * 512 for path in (tmp_path / "d" / "kv" / "_").rglob("*.pion"))
        assert on_disk <= cap
        assert engine.lookup(b"p39")
        assert engine.why(b"p0").startswith("evicted")
    for name in ("README", "kv/_/strange.pion", "kv/_/00/notes.txt"):
        path = tmp_path / "d" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * 1000)
    with Engine(tmp_path / "d", max_bytes=cap // 4, ticker=False) as engine:
        assert engine.info()["vstore_file_bytes"] <= cap // 4
        assert engine.lookup(b"p39")
        for thread in engine._threads:
            thread.join()
        assert engine.info()["vstore_foreign_files"] == 2
        with pytest.raises(OutOfMemoryError, match=r"^OOM --max-bytes"):
            fill(engine, b"large", rows=4096, layers=1)
        assert not engine.lookup(b"large")
    assert (tmp_path / "d" / "kv/_/00/notes.txt").read_bytes() == b"x" * 1000


def test_what_is_being_written_is_not_evicted(tmp_path: Path) -> None:
    with Engine(tmp_path / "d", max_bytes=1 << 20, ticker=False) as engine:
        engine.register(b"busy", DIM, F16)
        blob = words(1, 2048, DIM, F16)
        sink = engine.v_store_open(b"busy_pk", 0, 0, 2048, len(blob))
        for i in range(20):
            fill(engine, b"p%d" % i, rows=256, layers=1)
        sink.feed(blob)
        engine.v_store_finish(sink, "F16")
        assert fetched(engine, b"busy_pk", 0, 2048, native=True) == blob


def test_a_dropped_file_counts_while_a_reader_holds_it(engine: Engine) -> None:
    blob = fill(engine, b"ns", rows=512)
    body = engine.v_fetch_range(b"ns_pk", 0, 0, 512, native=True)
    before = engine.info()["vstore_file_bytes"]
    engine.drop(b"ns")
    fill(engine, b"ns", rows=4)
    assert engine.info()["vstore_file_bytes"] >= before
    assert body is not None
    assert body.tobytes() == blob  # one generation, whole
    del body
    engine.info()  # sees that nobody holds it any more
    assert stream.drain(10)
    assert engine.info()["vstore_file_bytes"] < before


def test_h6_the_default_cap_is_finite(tmp_path: Path) -> None:
    with Engine(tmp_path / "d", ticker=False) as engine, Engine(None, memory_only=True, ticker=False) as memory:
        assert 0 < engine.info()["vstore_max_bytes"] < 1 << 50
        assert 0 < memory.info()["vstore_max_bytes"] < 1 << 45


def test_entries_that_hold_only_state_are_capped_too(tmp_path: Path) -> None:
    with Engine(tmp_path / "d", max_sessions=8, ticker=False) as engine:
        for i in range(30):
            engine.ssm_store(b"s%d" % i, 0, b"state")
        assert engine.info()["vstore_entries"] == 8
        assert engine.ssm_fetch(b"s29", 0) is not None
        assert engine.ssm_fetch(b"s0", 0) is None


def test_b11_files_that_are_found_later_are_under_the_caps_too(tmp_path: Path) -> None:
    """An index that vouches for everything, and files it does not know: they come in one by one, while it is served."""
    with Engine(tmp_path / "d", ticker=False) as engine:
        for i in range(20):
            fill(engine, b"other%d" % i, rows=256)
    aside = tmp_path / "aside"
    (tmp_path / "d" / "kv").rename(aside)
    (tmp_path / "d" / "pion.index").unlink()
    with Engine(tmp_path / "d", ticker=False) as engine:
        fill(engine, b"mine", rows=256)
    for path in sorted(aside.glob("_/*/*.pion")):
        target = tmp_path / "d" / "kv" / path.relative_to(aside)
        target.parent.mkdir(exist_ok=True)
        path.rename(target)
    size = 1 << 20
    with Engine(tmp_path / "d", max_bytes=size, ticker=False) as engine:
        for thread in engine._threads:
            thread.join()
        info = engine.info()
        assert size // 2 < info["vstore_file_bytes"] <= size
        assert info["vstore_evicted"] > 0
        assert engine.lookup(b"mine")  # nobody knows when the others were used
    with Engine(tmp_path / "d", max_sessions=6, ticker=False) as engine:
        assert (engine.info()["vstore_sessions"], engine.lookup(b"mine")) == (6, True)


def overwrite(engine: Engine, sid: bytes, times: int, rows: int, blob: bytes, cap: int) -> int:
    """Store the same rows again and again; the most bytes that were charged for files."""
    most = 0
    for _ in range(times):
        engine.v_store(sid, 0, 0, rows, blob, "F16")
        most = max(most, engine.info()["vstore_file_bytes"])
        assert most <= cap
    return most


@pytest.mark.parametrize("memory", [False, True], ids=["disk", "memory"])
def test_b11_a_session_may_overwrite_itself_for_ever(tmp_path: Path, memory: bool) -> None:
    """Its dead bytes fill the cap sooner than the background compacts; the write waits and is never refused."""
    cap, rows = 1 << 20, 1024
    blob = words(7, rows, DIM, F16)  # 128 KiB
    with Engine(tmp_path / "d", max_bytes=cap, memory_only=memory, appendfsync="no", ticker=False) as engine:
        fill(engine, b"idle", rows=16)
        engine.register(b"busy", DIM, F16)
        engine.v_store(b"busy_pv", 0, 0, rows, blob, "F16")
        assert overwrite(engine, b"busy_pk", 200, rows, blob, cap) > cap // 2
        assert fetched(engine, b"busy_pk", 0, rows, native=True) == blob
        assert fetched(engine, b"busy_pv", 0, rows, native=True) == blob
        assert engine.lookup(b"idle")  # nobody had to go for it


def test_b11_another_goes_before_a_write_to_a_pinned_session_is_refused(tmp_path: Path) -> None:
    cap, rows = 1 << 20, 1024
    blob = words(7, rows, DIM, F16)
    with Engine(tmp_path / "d", max_bytes=cap, appendfsync="no", ticker=False) as engine:
        fill(engine, b"idle", rows=1024, layers=2)  # half of the cap
        engine.register(b"busy", DIM, F16)
        engine.pin(b"busy")
        overwrite(engine, b"busy_pk", 30, rows, blob, cap)
        overwrite(engine, b"busy_pv", 30, rows, blob, cap)
        assert not engine.lookup(b"idle")


def test_b11_states_that_replace_each_other(tmp_path: Path) -> None:
    cap, blob = 1 << 20, bytes(200_000)
    with Engine(tmp_path / "d", max_bytes=cap, appendfsync="no", ticker=False) as engine:
        for i in range(50):
            engine.ssm_store(b"ns", 0, blob)
            assert engine.info()["vstore_file_bytes"] <= cap
            sink = engine.ssm_store_open(b"ns", 1, len(blob))  # the same, in pieces
            sink.feed(blob)
            engine.ssm_store_finish(sink)
            del sink  # it holds the file
            assert engine.info()["vstore_file_bytes"] <= cap, i


def test_nothing_goes_for_a_write_that_will_be_refused_anyway(tmp_path: Path) -> None:
    cap = 1 << 20
    with Engine(tmp_path / "d", max_bytes=cap, ticker=False) as engine:
        for i in range(4):
            fill(engine, b"p%d" % i, rows=64)
        engine.register(b"large", DIM, F16)
        blob = words(1, 6000, DIM, F16)  # 750 KiB
        engine.v_store(b"large_pk", 0, 0, 6000, blob, "F16")
        with pytest.raises(OutOfMemoryError, match=r"^OOM --max-bytes"):
            engine.v_store(b"large_pv", 0, 0, 6000, blob, "F16")
        assert all(engine.lookup(b"p%d" % i) for i in range(4))
        assert engine.info()["vstore_evicted"] == 0


@pytest.mark.parametrize("memory", [False, True], ids=["disk", "memory"])
def test_b11_fifty_threads_stay_within_the_caps(tmp_path: Path, memory: bool) -> None:
    """They make, overwrite, stream into and drop prefixes of their own and one that all share."""
    cap, sessions, rows = 4 << 20, 60, 256
    failures: list[BaseException] = []
    done = threading.Event()
    refused = [0]
    texts: dict[str, int] = {}
    engine = Engine(tmp_path / "d", max_bytes=cap, max_sessions=sessions, memory_only=memory, appendfsync="no")

    def write(number: int) -> None:
        rng = random.Random(number)
        blob = words(number, rows, DIM, F16)
        for i in range(25):
            ns = rng.choice([b"own%d" % number, b"new%d-%d" % (number, i), b"shared"])
            try:
                engine.register(ns, DIM, F16)
                sid, layer = ns + rng.choice([b"_pk", b"_pv"]), rng.randrange(3)
                if rng.random() < 0.5:
                    engine.v_store(sid, layer, 0, rows, blob, "F16")
                else:
                    sink: object = engine.v_store_open(sid, layer, 0, rows, len(blob))
                    sink.feed(blob[: len(blob) // 2])
                    if rng.random() < 0.2:
                        engine.v_store_abort(sink)
                    else:
                        sink.feed(blob[len(blob) // 2 :])
                        engine.v_store_finish(sink, "F16")
                    del sink  # it holds the file
                if rng.random() < 0.1:
                    engine.drop(ns)
            except SessionNotFoundError:
                sink = None
                continue  # evicted between the two calls
            except CommandError as error:
                if not ("dropped while" in str(error) or "OOM" in str(error)):
                    failures.append(error)
                    raise
                refused[0] += 1
                texts[str(error)] = texts.get(str(error), 0) + 1
            except BaseException as error:
                failures.append(error)
                raise

    def watch() -> None:
        while not done.wait(0.001):
            assert stream.drain(10)
            info = engine.info()
            if info["vstore_file_bytes"] > cap or info["vstore_sessions"] > sessions:
                failures.append(
                    AssertionError(f"{info['vstore_file_bytes']} bytes, {info['vstore_sessions']} sessions")
                )
                return

    threads = [threading.Thread(target=write, args=(number,)) for number in range(50)]
    watcher = threading.Thread(target=watch)
    with engine:
        watcher.start()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        done.set()
        watcher.join()
        assert not failures, failures[:3]
        assert refused[0] == 0, texts
        assert engine.info()["vstore_evicted"] > 50
        engine._upkeep.stop()
        used = engine.info()["vstore_file_bytes"]
        assert used == sum(entry.disk for entry in engine._store.entries.values()) + sum(engine._store.gone_bytes())


def test_others_do_not_go_for_dead_bytes(tmp_path: Path) -> None:
    """A session above an eighth of the cap overwrites itself in a full store: at most a copy of it has to fit in."""
    cap, rows = 2 << 20, 3072
    blob = words(7, rows, DIM, F16)  # 384 KiB
    with Engine(tmp_path / "d", max_bytes=cap, appendfsync="no", ticker=False) as engine:
        for i in range(60):
            fill(engine, b"p%d" % i, rows=64)  # 36 KiB each: more than fit
        engine.register(b"busy", DIM, F16)
        before = engine.info()
        engine.v_store(b"busy_pk", 0, 0, rows, blob, "F16")
        piece = rows // 12
        for i in range(400):
            engine.v_store(b"busy_pk", 0, i % 12 * piece, piece, blob[: len(blob) // 12], "F16")
        info = engine.info()
        assert before["vstore_evicted"] > 0
        gone = (info["vstore_evicted"] - before["vstore_evicted"]) * (36 << 10)
        assert gone <= 3.5 * len(blob)
        assert engine.lookup(b"p59")


def test_what_a_compaction_copies_is_charged_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that come while the new file is written stand in both, and the cap knows."""
    rows = 256
    blob = words(7, rows, DIM, F16)
    charged: list[tuple[int, int]] = []
    with Engine(tmp_path / "d", appendfsync="no", ticker=False) as engine:
        engine.register(b"ns", DIM, F16)
        engine.v_store(b"ns_pk", 0, 0, rows, blob, "F16")
        flush = compact._Job._flush

        def flush_and_store(job: compact._Job) -> None:
            flush(job)
            files = [path.stat().st_size for path in (tmp_path / "d" / "kv").rglob("*.pion*")]
            charged.append((engine.info()["vstore_file_bytes"], sum(files)))
            if len(charged) < 4:
                engine.v_store(b"ns_pv", len(charged), 0, rows, blob, "F16")

        monkeypatch.setattr(compact._Job, "_flush", flush_and_store)
        assert engine.compact(b"ns")
        assert len(charged) == 4
        assert charged[-1][1] > 8 * len(blob) - 20_000  # both files held nearly everything
        assert all(told >= real for told, real in charged), charged
        assert stream.drain(10)
        assert engine.info()["vstore_file_bytes"] == engine._store.entries[b"pns"].disk


@pytest.mark.parametrize("how", ["done", "given up", "dropped"])
def test_b11_no_file_is_counted_twice_behind_a_compaction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Its copy is the entry's from the moment that the other one has been removed: whoever looks in between, or needs
    room, sees it once."""
    told: list[tuple[int, int]] = []
    with Engine(tmp_path / "d", appendfsync="no", ticker=False) as engine:
        fill(engine, b"ns", rows=256)
        store = engine._store

        def look() -> None:
            with store.lock:
                told.append((store.totals.disk, sum(entry.disk for entry in store.entries.values())))

        flush, close = compact._Job._flush, compact._Job.close

        def at_work(job: compact._Job) -> None:
            flush(job)
            engine.v_store(b"ns_pv", 0, 0, 256, words(8, 256, DIM, F16), "F16")  # charged for both
            if how == "dropped":
                engine.drop(b"ns")

        def closing(job: compact._Job) -> None:
            if job.swapped:
                look()
            close(job)
            look()

        monkeypatch.setattr(compact._Job, "_flush", at_work)
        monkeypatch.setattr(compact._Job, "close", closing)
        if how == "given up":
            monkeypatch.setattr(compact._Job, "_possible", lambda _: False)
        else:
            monkeypatch.setattr(compact, "_ROUNDS", 1)
        assert engine.compact(b"ns") == (how == "done")
        look()
    assert len(told) == (3 if how == "done" else 2)
    assert all(counted == held for counted, held in told), told


def test_b11_files_that_were_not_listed_yet_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Engine(tmp_path / "d", ticker=False) as engine:
        for i in range(10):
            fill(engine, b"p%d" % i, rows=256)
        held = engine.info()["vstore_file_bytes"]
    (tmp_path / "d" / "pion.index").unlink()
    go = threading.Event()
    listing = startup.list_directory
    monkeypatch.setattr(startup, "list_directory", lambda *args: go.wait(60) and listing(*args))
    cap = held + (64 << 10)
    with Engine(tmp_path / "d", max_bytes=cap, ticker=False) as engine:
        engine.register(b"new", DIM, F16)
        blob = words(1, 1024, DIM, F16)  # 128 KiB
        with pytest.raises(OutOfMemoryError, match=r"^OOM --max-bytes"):  # what may go is not known yet
            engine.v_store(b"new_pk", 0, 0, 1024, blob, "F16")
        assert engine.lookup(b"p3")  # found at the first look
        go.set()
        for thread in engine._threads:
            thread.join()
        engine.v_store(b"new_pk", 0, 0, 1024, blob, "F16")
        assert held // 2 < engine.info()["vstore_file_bytes"] <= cap
        assert engine.lookup(b"p3")


@pytest.mark.parametrize("replace", [False, True])
def test_what_is_declared_larger_than_the_cap_is_refused_at_once(tmp_path: Path, replace: bool) -> None:
    """Both sides count in their stored formats, and nothing goes for it, the entry of that name included."""
    cap = 1 << 20
    with Engine(tmp_path / "d", max_bytes=cap, ticker=False) as engine:
        names = [b"p%d" % i for i in range(6)]
        for ns in names:
            fill(engine, ns, rows=64)
        ns = names[0] if replace else b"large"
        need = 2 * 4 * 2048 * 2 * DIM
        with pytest.raises(OutOfMemoryError) as refused:
            engine.register(ns, DIM, F16, rows=2048, layers=4, digest="ab" * 32, replace=replace)
        assert str(refused.value) == (
            f"OOM --max-bytes {cap} is less than the {need} bytes of this prefix (4 layers of 2048 rows): nothing was "
            "evicted for it"
        )
        assert all(engine.lookup(name) for name in names)
        assert engine.info()["vstore_evictions"] == 0
        if not replace:
            assert engine.why(ns) == f"never stored: its REGISTER was refused: {refused.value}"
        engine.register(b"later", DIM, F16)  # declared in a second step
        with pytest.raises(OutOfMemoryError, match="bytes of this prefix"):
            engine.register(b"later", DIM, F16, rows=2048, layers=4)
        engine.register(b"small", DIM, limits.FORMATS["turbo2"], rows=2048, layers=4)  # the stored bytes count


@pytest.mark.parametrize("streamed", [False, True])
def test_a_record_that_makes_its_entry_larger_than_the_cap_evicts_nobody(tmp_path: Path, streamed: bool) -> None:
    cap = 1 << 20
    with Engine(tmp_path / "d", max_bytes=cap, ticker=False) as engine:
        for i in range(4):
            fill(engine, b"p%d" % i, rows=256)
        engine.register(b"undeclared", DIM, F16)
        blob = words(1, cap // (2 * DIM), DIM, F16)
        refused = rf"^OOM --max-bytes {cap} is less than the \d+ bytes that this entry alone would take"
        with pytest.raises(OutOfMemoryError, match=refused):
            if streamed:
                engine.v_store_open(b"undeclared_pk", 0, 0, cap // (2 * DIM), len(blob))
            else:
                engine.v_store(b"undeclared_pk", 0, 0, cap // (2 * DIM), blob, "F16")
        assert all(engine.lookup(b"p%d" % i) for i in range(4))
        with pytest.raises(OutOfMemoryError, match=refused):  # or in steps, once the others are gone
            for layer in range(80):
                engine.v_store(b"undeclared_pk", layer, 0, 128, blob[: 128 * 2 * DIM], "F16")


@pytest.mark.parametrize("how", ["read", "written"])
def test_b11_nobody_goes_for_a_write_that_is_refused(tmp_path: Path, how: str) -> None:
    """What is left without them is read or written, so they would not do."""
    with Engine(tmp_path / "d", max_bytes=4 << 20, ticker=False) as engine:
        engine.register(b"large", DIM, F16)
        blob = words(7, 20_000, DIM, F16)
        engine.v_store(b"large_pk", 0, 0, 20_000, blob, "F16")
        for number in range(8):
            fill(engine, b"small%d" % number, rows=256)
        if how == "read":
            using = engine.v_fetch_range(b"large_pk", 0, 0, 20_000, native=True)
        else:
            using = engine.v_store_open(b"large_pk", 1, 0, 64, 2 * 64 * DIM)
        engine.register(b"new", DIM, F16)
        with pytest.raises(OutOfMemoryError):
            engine.v_store(b"new_pk", 0, 0, 14_000, blob[: 14_000 * 2 * DIM], "F16")
        assert engine.info()["vstore_evicted"] <= 1
        del using


def test_b11_a_write_waits_for_what_others_are_writing(tmp_path: Path) -> None:
    """A moment, and nobody else goes meanwhile."""
    with Engine(tmp_path / "d", max_bytes=4 << 20, ticker=False) as engine:
        engine.register(b"large", DIM, F16)
        blob = words(7, 20_000, DIM, F16)
        sinks = [engine.v_store_open(b"large_pk", 0, 0, 20_000, len(blob))]
        for number in range(4):
            fill(engine, b"small%d" % number, rows=256)
        engine.register(b"new", DIM, F16)

        def end() -> None:
            engine.v_store_abort(sinks.pop())

        timer = threading.Timer(0.5, end)
        timer.start()
        engine.v_store(b"new_pk", 0, 0, 14_000, blob[: 14_000 * 2 * DIM], "F16")
        timer.join()
        assert engine.info()["vstore_evicted"] <= 1
