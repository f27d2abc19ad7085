"""B1, B11: files that were exchanged, put in the wrong place or may not be read, and directories that are none."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from pion.errors import StartupError, StorageError
from pion.store import index
from pion.store.engine import Engine
from pion.tools.check import check
from tests.faults.damage import BIG, Model
from tests.faults.trial import Trial


def _exchange(root: Path, one: str, other: str) -> None:
    os.rename(root / one, root / "between")
    os.rename(root / other, root / one)
    os.rename(root / "between", root / other)


@pytest.mark.parametrize("trial", ["closed", "killed"], indirect=True)
@pytest.mark.parametrize("indexed", [True, False], ids=["index", "no index"])
def test_b1_two_entries_are_exchanged(trial: Trial, indexed: bool) -> None:
    """Each holds whole records, of the other's name."""
    one, other = trial.model.path[b"whole"], trial.model.path[b"states"]
    _exchange(trial.root, one, other)
    if not indexed:
        (trial.root / index.NAME).unlink()
    trial.names = [Path(one).name, Path(other).name]
    trial.look()
    assert trial.report.problems >= 2
    trial.finish({b"whole", b"states"})


def test_b1_an_entry_under_another_ones_name(trial: Trial) -> None:
    one, other = trial.model.path[b"whole"], trial.model.path[b"other"]
    shutil.copy(trial.root / other, trial.root / one)
    trial.names = [Path(one).name]
    trial.look()
    trial.finish({b"whole"})


@pytest.mark.parametrize("pair", [
    ("pion.wal.2", "pion.snapshot.2"), ("pion.wal.2", index.NAME), (index.NAME, "entry"), ("pion.snapshot.2", "entry"),
    ("pion.wal.2", "pion.wal.7"), ("pion.snapshot.2", "pion.snapshot.7"),
])  # fmt: skip
def test_files_of_two_kinds_are_exchanged(trial: Trial, pair: tuple[str, str]) -> None:
    names = [trial.model.path[b"whole"] if name == "entry" else name for name in pair]
    if (trial.root / names[1]).exists():
        _exchange(trial.root, *names)
    else:
        os.rename(trial.root / names[0], trial.root / names[1])
    trial.names = [Path(name).name for name in names]
    trial.look()
    trial.finish({b"whole"} if "entry" in pair else set(), keys=any("wal" in n or "snapshot" in n for n in pair))


def test_two_large_values_are_exchanged(trial: Trial) -> None:
    one, other = sorted(os.listdir(trial.root / "blob"))
    _exchange(trial.root, f"blob/{one}", f"blob/{other}")
    trial.names = [one, other]
    trial.look()
    trial.finish(set(), keys=True)


def test_the_index_of_another_directory(trial: Trial, templates: dict[str, tuple[Path, Model]]) -> None:
    """Same names, other generations."""
    shutil.copy(templates["closed"][0] / index.NAME, trial.root / index.NAME)
    trial.finish(set())


def test_b11_foreign_files_everywhere(trial: Trial) -> None:
    """Reported, not counted, not touched."""
    sub = Path(trial.model.path[b"whole"]).parent
    foreign = [
        "README", "pion.wal.01", "pion.wal.backup", "kv/notes", "kv/_/list.txt", f"{sub}/.DS_Store", f"{sub}/x.pion",
        "kv/_/zz/deep/file", "quarantine/mine", "pion.vstore.snapshot",
    ]  # fmt: skip
    for name in foreign:
        (trial.root / name).parent.mkdir(parents=True, exist_ok=True)
        (trial.root / name).write_bytes(b"PIONVS01 " + name.encode())
    trial.look()
    assert not trial.report.problems
    trial.finish(set())
    for name in foreign:
        assert (trial.root / name).read_bytes() == b"PIONVS01 " + name.encode()


@pytest.mark.parametrize("name", ["kv", "kv/_", "entry", "kv/trash", "quarantine", "blob", "pion.lock"])
@pytest.mark.parametrize("how", ["file", "gone"])
def test_a_directory_that_is_none(trial: Trial, name: str, how: str) -> None:
    """And a lock that is one."""
    path = trial.root / (str(Path(trial.model.path[b"whole"]).parent) if name == "entry" else name)
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    if name == "pion.lock":
        path.mkdir()
    elif how == "file":
        path.write_bytes(b"not a directory")
    touched = set(trial.model.names) if name in ("kv", "kv/_") else {b"whole"} if name == "entry" else set()
    if name == "entry":
        touched |= {
            ns for ns in trial.model.names if trial.model.path[ns].startswith(str(path.relative_to(trial.root)))
        }
    trial.names = [Path(trial.model.path[ns]).name for ns in touched] + ["blob"]
    if name != "pion.lock":
        trial.look()
    trial.finish(touched, keys=name == "blob")


@pytest.fixture
def stranger(templates: dict[str, tuple[Path, Model]]) -> Iterator[Path]:
    """A copy of a directory that belongs to somebody without privileges, who is also running the test."""
    folder = Path(tempfile.mkdtemp(prefix="pion-test-"))
    shutil.copytree(templates["killed"][0], folder / "data")
    privileged = os.geteuid() == 0
    if privileged:
        for path in [folder, *folder.rglob("*")]:
            os.chown(path, 65534, 65534)
        os.setegid(65534)
        os.seteuid(65534)
    try:
        yield folder / "data"
    finally:
        if privileged:
            os.seteuid(0)
            os.setegid(0)
        shutil.rmtree(folder)


@pytest.mark.parametrize("mode", [0o000, 0o400])
@pytest.mark.parametrize("name", ["entry", index.NAME, "pion.wal.2", "pion.snapshot.2"])
def test_b1_a_file_that_may_not_be_opened(
    stranger: Path, templates: dict[str, tuple[Path, Model]], caplog: pytest.LogCaptureFixture, name: str, mode: int
) -> None:
    trial = Trial((stranger, templates["killed"][1]), stranger, caplog)
    path = trial.model.path[b"whole"] if name == "entry" else name
    os.chmod(stranger / path, mode)
    trial.names = [Path(path).name]
    trial.look()
    assert bool(trial.report.problems) == (mode == 0)
    trial.plain = True
    trial.finish({b"whole"} if name == "entry" else set(), keys="." in name and name != index.NAME)


def test_a_large_value_that_may_not_be_read(stranger: Path) -> None:
    """An error that says so; the key stays, and is there again with the permission."""
    for path in (stranger / "blob").iterdir():
        os.chmod(path, 0)
    for mode in (0, 0o600):
        with Engine(stranger, ticker=False) as engine:
            if mode:
                assert engine.keyspace.get(0, b"big") == BIG
                continue
            with pytest.raises(
                StorageError, match=r"^ERR the file of the value, blob/\w{16}, cannot be read: Permission"
            ):
                engine.keyspace.get(0, b"big")
            assert engine.keyspace.exists(0, b"big")
        for path in (stranger / "blob").iterdir():
            os.chmod(path, 0o600)


def test_a_folder_that_may_not_be_entered_is_not_the_end_of_its_entries(
    stranger: Path, templates: dict[str, tuple[Path, Model]], caplog: pytest.LogCaptureFixture
) -> None:
    """They cannot be moved aside either; as soon as the folder can be entered they are there again."""
    trial = Trial((stranger, templates["killed"][1]), stranger, caplog)
    folder = stranger / Path(trial.model.path[b"whole"]).parent
    inside = {ns for ns in trial.model.names if (stranger / trial.model.path[ns]).parent == folder}
    os.chmod(folder, 0)
    engine = trial.start()
    try:
        assert not engine.lookup(b"whole")
        assert not trial.compare(engine, inside, keys=False)
        assert "could not be moved aside" in caplog.text
    finally:
        engine.close()
    os.chmod(folder, 0o700)
    trial.finish(set())


def test_a_directory_that_may_not_be_written(stranger: Path) -> None:
    """Refused in a sentence."""
    os.chmod(stranger / "pion.lock", 0)
    with pytest.raises(StartupError, match=r"^data directory .*pion.lock: Permission denied$"):
        Engine(stranger, ticker=False)
    os.chmod(stranger, 0)
    with pytest.raises(StartupError, match=r"^data directory .*: Permission denied$"):
        Engine(stranger, ticker=False)


def test_a_directory_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(b"x")
    with pytest.raises(StartupError, match="there is a file of that name"):
        Engine(tmp_path / "data", ticker=False)


def test_a_start_puts_everything_right(trial: Trial) -> None:
    """The directory that nothing happened to: nothing is found before or after."""
    trial.look()
    assert not trial.report.problems
    trial.finish(set())
    assert check(trial.root).problems == 0
