"""`pion check DIR`: exit codes, what it prints, and that it changes nothing. What it finds: tests/faults."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pion._core import framing
from pion.cli import main
from pion.errors import StartupError
from pion.store import layout
from pion.store.engine import Engine
from pion.tools import check as tool
from pion.tools.findings import Progress
from tests.store.model import F16
from tests.store.support import DIM, crash, fill
from tests.support.process import Process


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Two prefixes, a raw session, some keys; closed in order."""
    root = tmp_path / "data"
    with Engine(root, ticker=False) as engine:
        fill(engine, b"one", rows=40)
        fill(engine, b"two", rows=8)
        engine.v_create(b"raw", DIM, F16)
        engine.keyspace.set(0, b"key", b"value")
        engine.keyspace.flush_log()
    return root


def _snapshot(root: Path) -> dict[str, tuple[int, bytes, int]]:
    return {
        str(path.relative_to(root)): (path.stat().st_size, path.read_bytes(), path.stat().st_mtime_ns)
        for path in root.rglob("*")
        if path.is_file()
    }


def _entry(root: Path, ns: bytes) -> Path:
    return root / layout.entry_path(layout.PREFIX + ns)


def _flip(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


def test_clean(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = _snapshot(data)
    assert main(["check", str(data)]) == 0
    out = capsys.readouterr()
    assert out.out == f"3 entries with 11 records, 1 keys from 1 records, {_mib(data)} MiB: clean\n"
    assert out.err == ""
    assert _snapshot(data) == before, "it only reads"
    with Engine(data, ticker=False) as engine:
        assert engine.lookup(b"one")


def _mib(root: Path) -> str:
    paths = [*(root / "kv").rglob("*.pion"), *root.glob("pion.wal.*")]
    return f"{sum(path.stat().st_size for path in paths) / 2**20:.1f}"


def test_a_problem_is_named_with_file_offset_and_reason(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = _entry(data, b"one")
    fd = os.open(path, os.O_RDONLY)
    head = framing.read_file_header(fd)
    third = list(framing.Scanner(fd, head.size, head.seed))[2]
    os.close(fd)
    _flip(path, third.payload_offset + 3)
    before = _snapshot(data)
    assert main(["check", str(data)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == (
        f"problem: {path.relative_to(data)}: offset {third.offset}: the payload of a STORE record "
        f"(layer 0 V rows 0..39) does not match its checksum"
    )
    assert lines[-1].endswith(": 1 problem")
    assert len(lines) == 2
    assert _snapshot(data) == before
    assert main(["check", "--quiet", str(data)]) == 1
    assert capsys.readouterr().out.splitlines() == lines[:1]
    assert main(["check", "--json", str(data)]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["clean"] is False
    assert found["entries"] == 3
    assert [(item["path"], item["offset"]) for item in found["findings"]] == [
        (str(path.relative_to(data)), third.offset)
    ]


def test_every_problem_is_found_in_one_go(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = _entry(data, b"one"), _entry(data, b"two")
    _flip(one, one.stat().st_size - 30)
    two.unlink()
    with (data / "pion.wal.1").open("ab") as file:
        file.write(b"\xff" * 100)
    (data / "kv/_/00/notes.txt").write_text("mine")
    (data / "backup").mkdir()
    assert main(["check", str(data)]) == 1
    out = capsys.readouterr().out
    assert f"problem: {one.relative_to(data)}: offset" in out
    assert f"problem: {two.relative_to(data)}: is missing: the index has it as prefix 'two'" in out
    assert "problem: pion.wal.1: offset" in out
    assert "note: kv/_/00/notes.txt: no entry of Pion: left alone" in out
    assert "note: backup: not of this data directory" in out
    assert out.splitlines()[-1].endswith("3 problems")


def test_what_a_kill_leaves_is_no_problem(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Engine(tmp_path / "live", ticker=False) as engine:
        fill(engine, b"ns")
        engine.keyspace.set(0, b"key", b"value")
        engine.keyspace.flush_log()
        root = crash(tmp_path / "live", tmp_path / "killed")
    path = next((root / "kv").rglob("*.pion"))
    os.truncate(path, path.stat().st_size - 100)
    log = root / "pion.wal.1"
    os.truncate(log, log.stat().st_size - 2)
    assert main(["check", str(root)]) == 0
    out = capsys.readouterr().out
    assert out.count("of a write that was interrupted; the next start cuts them off") == 2


@pytest.mark.parametrize("torn", [False, True], ids=["whole records", "a torn one"])
@pytest.mark.parametrize("committed", [True, False])
def test_b1_missing_records_are_a_problem_if_they_had_been_flushed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, committed: bool, torn: bool
) -> None:
    with Engine(tmp_path / "live", ticker=False) as engine:
        fill(engine, b"ns")
        if committed:
            engine.commit()
        root = crash(tmp_path / "live", tmp_path / "killed")
    path = _entry(root, b"ns")
    fd = os.open(path, os.O_RDONLY)
    head = framing.read_file_header(fd)
    last = list(framing.Scanner(fd, head.size, head.seed))[-1]
    os.close(fd)
    os.truncate(path, last.offset + 100 * torn)
    assert main(["check", str(root)]) == (1 if committed else 0)
    said = f"problem: {path.relative_to(root)}: offset {last.offset}: its records end here: those up to "
    assert (said in capsys.readouterr().out) == committed
    with Engine(root, ticker=False) as engine:
        assert engine.info()["vstore_shortened"] == committed
        assert ("what followed is lost" in caplog.text) == committed
    assert main(["check", str(root)]) == 0, "it was told once"
    with Engine(root, ticker=False) as engine:
        assert engine.v_fetch_range(b"ns_pk", 0, 0, 16) is not None
        assert engine.info()["vstore_shortened"] == 0


def test_a_server_holds_the_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Process(tmp_path / "data") as process:
        assert main(["check", str(tmp_path / "data")]) == 2
        out = capsys.readouterr()
        assert f"{tmp_path / 'data'} is in use by the process {process.pid}" in out.err
        assert out.out == ""
        process.kill()
    assert (tmp_path / "data/pion.lane").is_socket()
    assert main(["check", str(tmp_path / "data")]) == 0
    assert "pion.lane" not in capsys.readouterr().out
    (tmp_path / "data/pion.lane").unlink()
    (tmp_path / "data/pion.lane").write_text("mine")
    assert main(["check", str(tmp_path / "data")]) == 0
    assert "note: pion.lane: not of this data directory" in capsys.readouterr().out


def test_two_servers_on_one_directory(tmp_path: Path) -> None:
    """The second one refuses and names the first one's pid."""
    with Process(tmp_path / "data") as first:
        second = Process(tmp_path / "data")
        with pytest.raises(RuntimeError, match=rf"FATAL: data directory .* is in use by the process {first.pid}\n"):
            second.start()
        with pytest.raises(StartupError, match=f"in use by the process {first.pid}$"):
            Engine(tmp_path / "data", ticker=False)


def test_no_server_starts_meanwhile(data: Path) -> None:
    lock = tool.hold(data)
    try:
        with pytest.raises(StartupError, match="is being verified by pion check"):
            Engine(data, ticker=False)
    finally:
        os.close(lock)
    with Engine(data, ticker=False) as engine:
        assert engine.lookup(b"one")
        fd = os.open(data / "pion.lock", os.O_RDONLY)
        with pytest.raises(BlockingIOError):
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        os.close(fd)


@pytest.mark.parametrize("what", ["nothing", "a file", "another directory"])
def test_what_cannot_be_checked(tmp_path: Path, what: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x"
    if what == "a file":
        path.write_bytes(b"")
    elif what == "another directory":
        path.mkdir()
        (path / "notes").write_text("x")
    assert main(["check", str(path)]) == 2
    out = capsys.readouterr()
    assert out.err.startswith(f"pion check: {path}")
    assert out.out == ""


def test_a_copy_that_save_made(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It has no index and no lock."""
    with Engine(data, ticker=False) as engine:
        engine.save("copy")
    assert main(["check", str(data / "copy")]) == 0
    assert "note: pion.index: is missing" in capsys.readouterr().out


def test_progress_is_a_line_that_goes_away(capsys: pytest.CaptureFixture[str]) -> None:
    bar = Progress(1000, shown=True)
    bar.EVERY = 0.0  # type: ignore[misc]
    bar.add(250)
    bar.add(250)
    bar.clear()
    err = capsys.readouterr().err
    assert "[########                      ]  25%" in err
    assert "[###############               ]  50%" in err
    assert err.endswith("\r\033[K")


def test_the_command_needs_neither_numpy_nor_mlx_nor_trio(data: Path) -> None:
    script = (
        "import sys\n"
        "for name in ('numpy', 'mlx', 'trio'):\n    sys.modules[name] = None\n"
        "from pion.cli import main\n"
        f"assert main(['check', {str(data)!r}]) == 0\n"
        f"assert main(['inspect', {str(_entry(data, b'one'))!r}]) == 0\n"
        f"assert main(['inspect', {str(data / 'pion.index')!r}]) == 0\n"
        f"assert main(['inspect', {str(data / 'pion.wal.1')!r}]) == 0\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
