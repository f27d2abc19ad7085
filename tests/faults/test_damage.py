"""B1, B11, B12 and whatever else can happen to a data directory: every kind of damage to every kind of file.

Start always succeeds. What is answered is what was stored, an earlier acknowledged state where the end of a file was
cut off, or nothing, or an error; never anything else. What was not damaged is answered exactly. Damage is counted,
named in the log and kept aside, `pion check` sees it before the start and nothing after it, and what is stored
afterwards is there after another start.
"""

from __future__ import annotations

import os

import pytest

from pion.store import index
from tests.faults.damage import GENERAL, Damage, flip, log_damages, record_damages
from tests.faults.trial import Trial

closed = pytest.mark.parametrize("trial", ["closed"], indirect=True)
both = pytest.mark.parametrize("trial", ["closed", pytest.param("killed", marks=pytest.mark.slow)], indirect=True)
general = pytest.mark.parametrize("what", GENERAL, ids=lambda what: what.name)


@both
@general
@pytest.mark.parametrize("ns", [b"whole", b"states"], ids=["whole", "states"])
def test_b1_an_entry(trial: Trial, ns: bytes, what: Damage) -> None:
    trial.damage(trial.model.path[ns], what)
    trial.finish({ns})


@both
@general
def test_b12_the_index(trial: Trial, what: Damage) -> None:
    trial.damage(index.NAME, what)
    assert trial.report.findings
    trial.finish(set())


@both
@general
@pytest.mark.parametrize("name", ["pion.wal.2", "pion.snapshot.2"])
def test_b1_the_keyspace(trial: Trial, name: str, what: Damage) -> None:
    trial.damage(name, what)
    trial.finish(set(), keys=True)


@closed
@general
def test_b1_the_file_of_a_large_value(trial: Trial, what: Damage) -> None:
    (path, *_) = sorted((trial.root / "blob").iterdir())
    trial.damage(os.path.relpath(path, trial.root), what)
    trial.finish(set(), keys=True)


@pytest.mark.slow
@pytest.mark.parametrize("what", [what for what in GENERAL if what.name != "gone"], ids=lambda what: what.name)
def test_an_entry_and_the_index(trial: Trial, what: Damage) -> None:
    """Nothing says what the damaged entry was, so nobody can miss one that is gone."""
    (trial.root / index.NAME).unlink()
    trial.damage(trial.model.path[b"whole"], what)
    trial.finish({b"whole"})


@pytest.mark.parametrize("size", [128, 256, 400])
def test_an_entry_of_which_little_is_left(trial: Trial, size: int) -> None:
    """No record that counts behind damaged attributes: what the index says of it is not enough for a hit."""
    path = trial.model.path[b"whole"]
    trial.damage(path, Damage("cut", lambda file: os.truncate(file, size)))
    if size > 200:
        trial.damage(path, Damage("flip", lambda file: flip(file, 200)))
    assert trial.report.problems
    trial.finish({b"whole"})
    assert list((trial.root / "quarantine").iterdir())


@pytest.mark.slow
@general
@pytest.mark.parametrize("ns", [b"whole", b"states"], ids=["whole", "states"])
def test_an_entry_after_a_power_cut(trial: Trial, ns: bytes, what: Damage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another boot: every payload that was not flushed is compared at start."""
    trial.damage(trial.model.path[ns], what)
    monkeypatch.setattr(index, "boot_id", lambda: b"another")
    trial.finish({ns})


@pytest.mark.slow
@pytest.mark.parametrize("ns", [b"whole", b"states", b"turbo", b"raw_f32"], ids=lambda ns: ns.decode())
def test_b1_every_record_of_an_entry(trial: Trial, ns: bytes, request: pytest.FixtureRequest) -> None:
    """A bit in each field of each header, and in each payload."""
    path = trial.root / trial.model.path[ns]
    for number, what in enumerate(record_damages(path)):
        one = Trial(request.getfixturevalue("templates")["killed"], trial.root.with_name(f"{number}"), trial.caplog)
        one.damage(trial.model.path[ns], what)
        assert one.report.findings, what.name
        one.finish({ns})


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["pion.wal.2", "pion.snapshot.2", index.NAME])
def test_b1_every_record_of_a_log(trial: Trial, name: str, request: pytest.FixtureRequest) -> None:
    for number, what in enumerate(log_damages(trial.root / name)):
        one = Trial(request.getfixturevalue("templates")["killed"], trial.root.with_name(f"{number}"), trial.caplog)
        one.damage(name, what)
        assert one.report.findings, what.name
        one.plain = what.name.endswith("length")  # of the last record: as if it had been cut off
        one.finish(set(), keys=name != index.NAME)
