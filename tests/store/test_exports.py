"""V.EXPORT's files: what is in them, how long they stay, and who may open them."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from pion import limits
from pion._core import stream
from pion.errors import CommandError, StorageError
from pion.store import exports
from pion.store.engine import Engine

from .support import fill

FP16 = limits.FORMATS["fp16"]


def values(rows: int, dim: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, dim)).astype(np.float16)


def put(engine: Engine, ns: bytes, rows: int, dim: int, fmt: int = FP16, layers: int = 2) -> list[np.ndarray]:
    """K and V of a prefix; returns them, K of layer 0, V of layer 0, K of layer 1, ..."""
    engine.register(ns, dim, fmt)
    out = [values(rows, dim, number) for number in range(2 * layers)]
    for number, array in enumerate(out):
        engine.v_store(ns + (b"_pk", b"_pv")[number % 2], number // 2, 0, rows, array.tobytes(), "F16")
    return out


def read(path: str) -> dict[str, np.ndarray]:
    """A safetensors file, by its description: u64 header length, JSON, data."""
    data = Path(path).read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    head, out, covered = json.loads(data[8 : 8 + length]), {}, 0
    for name, about in head.items():
        if name != "__metadata__":
            assert about["dtype"] == "F16"
            start, end = about["data_offsets"]
            assert start == covered, "no gaps"
            covered = end
            body = np.frombuffer(data[8 + length :][start:end], np.float16)
            out[name] = body.reshape(about["shape"])
    assert 8 + length + covered == len(data)
    return out


def gone(path: str) -> bool:
    stream.drain()
    return not os.path.exists(path)


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize(("start", "end"), [(0, 200), (7, 9), (63, 130)])
def test_rows_are_laid_out_as_a_model_has_them(engine: Engine, heads: int, start: int, end: int) -> None:
    rows = put(engine, b"ns", 200, 12)
    found = read(engine.v_export(b"ns_pk", b"ns_pv", start, end, 2, heads, 12 // heads))
    assert list(found) == ["k.0", "v.0", "k.1", "v.1"]
    for number, array in enumerate(found.values()):
        want = rows[number][start:end].reshape(end - start, heads, -1).swapaxes(0, 1)[None]
        assert np.array_equal(array.view(np.uint16), want.view(np.uint16))


@pytest.mark.parametrize("name", ["bf16", "fp32", "int8", "fp8", "mlx4g32", "turbo4", "turbo2"])
def test_other_formats_are_what_a_fetch_gives_rounded(
    engine: Engine, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exports, "_PIECE", 64 * 4 * 64)  # pieces of 64 rows
    put(engine, b"ns", 200, 64, limits.FORMATS[name])
    found = read(engine.v_export(b"ns_pk", b"ns_pv", 10, 190, 2, 2, 32))
    for number, array in enumerate(found.values()):
        body = engine.v_fetch_range((b"ns_pk", b"ns_pv")[number % 2], number // 2, 10, 190)
        assert body is not None
        wide = np.frombuffer(body.tobytes(), np.float32)
        want = wide.astype(np.float16).reshape(180, 2, 32).swapaxes(0, 1)[None]
        assert np.array_equal(array.view(np.uint16), want.view(np.uint16))


def test_a_file_is_the_same_until_something_is_stored(engine: Engine) -> None:
    put(engine, b"ns", 4, 8)
    put(engine, b"other", 4, 8)
    ask = (b"ns_pk", b"ns_pv", 0, 4, 2, 1, 8)
    first, other = engine.v_export(*ask), engine.v_export(b"other_pk", b"other_pv", 0, 4, 2, 1, 8)
    assert engine.v_export(*ask) == first
    assert engine.v_export(b"ns_pk", b"ns_pv", 0, 3, 2, 1, 8) != first
    handle = open(first, "rb")  # noqa: SIM115
    for side in (b"ns_pk", b"ns_pv"):
        engine.v_store(side, 1, 3, 1, bytes(16), "F16")
        second = engine.v_export(*ask)
        assert second != first
        assert gone(first)
        assert not read(second)["kv"[side == b"ns_pv"] + ".1"][0, 0, 3].any()
        first = second
    assert len(handle.read()) > 100, "who has it open keeps it"
    handle.close()
    assert engine.v_export(b"other_pk", b"other_pv", 0, 4, 2, 1, 8) == other


def test_a_change_deletes_the_file_within_a_tick(engine: Engine) -> None:
    put(engine, b"a", 4, 8)
    put(engine, b"b", 4, 8)
    put(engine, b"c", 4, 8)
    paths = [engine.v_export(ns + b"_pk", ns + b"_pv", 0, 4, 2, 1, 8) for ns in (b"a", b"b", b"c")]
    snap = engine.v_snapshot(b"b_pk")
    engine.v_store(b"b_pk", 0, 4, 1, bytes(16), "F16")
    engine.v_restore(b"b_pk", snap)
    engine.drop(b"a")
    engine.fsync_tick()
    assert [gone(path) for path in paths] == [True, True, False]
    put(engine, b"a", 4, 8)
    assert engine.v_export(b"a_pk", b"a_pv", 0, 4, 2, 1, 8) != paths[0]


def test_unused_files_go(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    put(engine, b"ns", 4, 8)
    path = engine.v_export(b"ns_pk", b"ns_pv", 0, 4, 2, 1, 8)
    engine.fsync_tick()
    assert not gone(path)
    monkeypatch.setattr(limits, "EXPORT_UNUSED", -1.0)
    engine.fsync_tick()
    assert gone(path)


def test_there_is_a_bound_for_all_files_together(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [b"n%d" % i for i in range(6)]
    for ns in names:
        put(engine, ns, 64, 8)
    paths = [engine.v_export(names[0] + b"_pk", names[0] + b"_pv", 0, 64, 2, 1, 8)]
    size = os.path.getsize(paths[0])
    monkeypatch.setattr(limits, "EXPORT_BYTES", 3 * size)
    for ns in names[1:]:
        paths.append(engine.v_export(ns + b"_pk", ns + b"_pv", 0, 64, 2, 1, 8))
    assert [gone(path) for path in paths] == [True] * 3 + [False] * 3
    monkeypatch.setattr(limits, "EXPORT_FILES", 2)
    engine.v_export(b"n0_pk", b"n0_pv", 0, 64, 2, 1, 8)
    assert sum(not gone(path) for path in paths) == 1
    monkeypatch.setattr(limits, "EXPORT_BYTES", size - 1)
    with pytest.raises(CommandError, match="above the"):
        engine.v_export(b"n1_pk", b"n1_pv", 0, 64, 2, 1, 8)


def test_what_is_not_held_is_refused(engine: Engine) -> None:
    put(engine, b"ns", 8, 8)
    engine.v_create(b"raw", 8, FP16)
    engine.v_store(b"raw", 0, 0, 2, bytes(32), "F16")
    engine.v_store(b"raw", 0, 4, 2, bytes(32), "F16")  # a gap
    cases = {
        (b"ns_pk", b"ns_pv", 0, 9, 2, 1, 8): "does not hold all rows",
        (b"ns_pk", b"ns_pv", 8, 9, 2, 1, 8): "does not hold all rows",
        (b"ns_pk", b"ns_pv", 0, 8, 3, 1, 8): "n_layers 3, K has 2",
        (b"ns_pk", b"raw", 0, 6, 1, 1, 8): "layer 0 of V does not hold all rows",
        (b"ns_pk", b"ns_pv", 0, 8, 2, 2, 8): "is 16, layer 0 of K has rows of 8",
        (b"ns_pk", b"none", 0, 8, 2, 1, 8): "session not found",
    }
    for ask, why in cases.items():
        with pytest.raises(CommandError, match=why):
            engine.v_export(*ask)
    engine.register(b"big", 8, limits.FORMATS["fp32"])
    for side in (b"big_pk", b"big_pv"):
        engine.v_store(side, 0, 0, 2, np.array([[0] * 8, [7e4] * 8], np.float32).tobytes(), "F32")
    with pytest.raises(CommandError, match="row 1 holds a value that fp16 cannot hold"):
        engine.v_export(b"big_pk", b"big_pv", 0, 2, 1, 1, 8)
    assert files(engine) == []


def files(engine: Engine) -> list[Path]:
    stream.drain()
    assert engine.root is not None
    return list((engine.root / "export").rglob("*.safetensors"))


def test_directory_and_files_are_for_their_owner_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = os.umask(0)
    try:
        for given in (None, tmp_path / "elsewhere" / "deep"):
            if given is not None:
                monkeypatch.setenv("PION_EXPORT_DIR", str(given))
            with Engine(tmp_path / "data", ticker=False) as engine:
                fill(engine, b"ns")
                path = Path(engine.v_export(b"ns_pk", b"ns_pv", 0, 16, 2, 1, 64))
                base = given or tmp_path / "data" / "export"
                assert path.is_absolute()
                assert path.parent.parent == base
                assert [path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777] == [0o600, 0o700]
                assert path.suffix == ".safetensors"
            assert list(base.iterdir()) == [], "the end of the engine is the end of its files"
    finally:
        os.umask(old)


@pytest.mark.parametrize("sid", [b"../../etc/passwd", b"/etc/passwd", b"a\0b", b"x" * 4000, b"%s\n"])
def test_no_path_comes_from_a_client(engine: Engine, sid: bytes) -> None:
    engine.v_create(sid, 8, FP16)
    engine.v_store(sid, 0, 0, 1, bytes(16), "F16")
    path = Path(engine.v_export(sid, sid, 0, 1, 1, 1, 8))
    assert engine.root is not None
    assert path.parent.parent == engine.root / "export"
    assert files(engine) == [path]


def test_a_killed_process_leaves_nothing_for_long(tmp_path: Path) -> None:
    root, program = tmp_path / "data", "from tests.store.test_exports import child; child()"
    child = subprocess.Popen(
        [sys.executable, "-c", program, str(root)], stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]
    )
    assert child.stdout is not None
    path = child.stdout.readline().decode().strip()
    assert os.path.exists(path)
    exports._remove_stale(root / "export")
    assert os.path.exists(path), "its process lives"
    child.kill()
    child.wait()
    child.stdout.close()
    assert os.path.exists(path)
    others = ["mine.safetensors", "pion-export-backup/mine.safetensors", "pion-export-12345678/mine.safetensors"]
    for name in others:
        other = root / "export" / name
        other.parent.mkdir(exist_ok=True)
        other.touch()
    with Engine(root, ticker=False):
        left = {str(item.relative_to(root / "export")) for item in (root / "export").rglob("*.safetensors")}
        assert left == set(others)
        assert not os.path.exists(os.path.dirname(path))


def child() -> None:
    engine = Engine(sys.argv[1], ticker=False)
    put(engine, b"ns", 4, 8)
    print(engine.v_export(b"ns_pk", b"ns_pv", 0, 4, 2, 1, 8), flush=True)
    sys.stdin.read()
    import time

    time.sleep(600)


def test_b7_a_full_disk_leaves_no_file(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    put(engine, b"ns", 64, 8)

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(exports.os, "pwrite", full)
        with pytest.raises(StorageError, match="No space left"):
            engine.v_export(b"ns_pk", b"ns_pv", 0, 64, 2, 1, 8)
    assert files(engine) == []
    assert read(engine.v_export(b"ns_pk", b"ns_pv", 0, 64, 2, 1, 8))


@pytest.fixture
def memory() -> Iterator[Engine]:
    with Engine(None, memory_only=True, ticker=False) as engine:
        yield engine


def test_memory_only_exports_too(memory: Engine) -> None:
    rows = put(memory, b"ns", 4, 8)
    path = memory.v_export(b"ns_pk", b"ns_pv", 0, 4, 2, 1, 8)
    assert np.array_equal(read(path)["k.0"][0, 0], rows[0])
    memory.close()
    assert not os.path.exists(os.path.dirname(path))
