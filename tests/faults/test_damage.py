"""B1, B11, B12 and whatever else can happen to a data directory: every kind of damage to every kind of file.

Start always succeeds. What is answered is what was stored, an earlier acknowledged state where the end of a file was
cut off, or nothing, or an error; never anything else. What was not damaged is answered exactly. Damage is counted,
named in the log and kept aside, `pion check` sees it before the start and nothing after it, and what is stored
afterwards is there after another start.
"""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

import pytest

from pion.store import index
from pion.store.engine import Engine
from pion.tools.check import Report, check
from tests.faults import damage
from tests.faults.damage import DIM, GENERAL, ROWS, Damage, Model, ask, keys_of
from tests.store.model import F16, words
from tests.store.support import fill


@pytest.fixture(scope="module")
def templates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Model]]:
    """The same directory after an end in order and after SIGKILL."""
    folder = tmp_path_factory.mktemp("templates")
    out = {}
    for name in ("closed", "killed"):
        out[name] = folder / name, damage.make(folder / name, killed=name == "killed")
    return out


class Trial:
    """One damaged copy: started, compared, started again."""

    def __init__(self, template: tuple[Path, Model], root: Path, caplog: pytest.LogCaptureFixture) -> None:
        shutil.copytree(template[0], root)
        self.root, self.model, self.caplog = root, template[1], caplog
        self.report = Report()
        self.names: list[str] = []  # of what was damaged
        self.plain = False

    def damage(self, path: str, what: Damage) -> None:
        what.do(self.root / path)
        self.names.append(Path(path).name)
        self.report = check(self.root)
        self.plain = what.plain

    def start(self) -> Engine:
        self.caplog.clear()
        with self.caplog.at_level(logging.INFO):
            engine = Engine(self.root, ticker=False)
        store = engine.keyspace_store
        assert store is not None
        store.tick()
        while store.rewriting:  # as the server does within a second when a log was damaged
            store.tick()
        return engine

    def compare(self, engine: Engine, touched: set[bytes], *, keys: bool) -> bool:
        """Check every answer; whether everything is as it was. `keys`: the keyspace is damaged."""
        model, same = self.model, True
        for ns in model.names:
            for place in model.places(ns):
                answer, stored = ask(engine, place), model.now[place]
                if answer == stored:
                    continue
                same = False
                assert ns in touched, (place, "was not damaged")
                if isinstance(answer, bytes):
                    assert answer in model.before.get(place, set()), (place, "wrong bytes")
            if ns in model.hits:
                hit = engine.lookup(ns)
                assert hit or ns in touched, ns
                if hit and ns != b"states":  # declared: then all of it is there
                    for place in model.places(ns):
                        if place[1] >= 0:
                            assert isinstance(ask(engine, place), bytes), place
        found = keys_of(engine)
        if not keys:
            assert found == {key: history[-1] for key, history in model.keys.items() if history[-1] is not None}
        for key, value in found.items():
            assert value in model.keys[key], (key, "a value it never had")
        missing = [key for key, history in model.keys.items() if found.get(key) != history[-1]]
        return same and not missing

    def finish(self, touched: set[bytes], *, keys: bool = False) -> None:
        """Start, compare, use, start again."""
        engine = self.start()
        try:
            same = self.compare(engine, touched, keys=keys)
            told = self.caplog.text
            info = engine.info()
            assert same or any(name in told for name in self.names), "what is missing is told"
            # else it was padding, or a record that later ones replace
            assert same or self.report.problems or (self.plain and self.report.findings), "pion check sees it"
            self._use(engine)
            lost = {place: ask(engine, place) for ns in touched for place in self.model.places(ns)}
            before = keys_of(engine)
        finally:
            engine.close()
        if not same and not info["vstore_quarantined"] and engine.keyspace_store is not None:
            recovery = engine.keyspace_store.recovery
            kept = list((self.root / "quarantine").iterdir()) + recovery.set_aside
            assert kept or recovery.lost_values or "gone" in told or "missing" in told or "bytes" in told, told
        after = check(self.root)
        assert not after.problems, [str(item) for item in after.findings]
        engine = self.start()
        try:
            assert {place: ask(engine, place) for place in lost} == lost
            assert keys_of(engine) == before
            assert engine.v_fetch_range(b"new_pk", 0, 0, ROWS, native=True).tobytes() == words(ROWS, ROWS, DIM, F16)  # type: ignore[union-attr]
            assert engine.lookup(b"new")
        finally:
            engine.close()

    def _use(self, engine: Engine) -> None:
        fill(engine, b"new", ROWS, 1)
        engine.keyspace.set(0, b"new", b"value")
        engine.keyspace.flush_log()


@pytest.fixture
def trial(
    request: pytest.FixtureRequest, templates: dict[str, tuple[Path, Model]], tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> Trial:  # fmt: skip
    return Trial(templates[request.param], tmp_path / "data", caplog)


closed = pytest.mark.parametrize("trial", ["closed"], indirect=True)
both = pytest.mark.parametrize("trial", ["closed", pytest.param("killed", marks=pytest.mark.slow)], indirect=True)


@both
@pytest.mark.parametrize("what", GENERAL, ids=lambda what: what.name)
@pytest.mark.parametrize("ns", [b"whole", b"states"], ids=["whole", "states"])
def test_b1_an_entry(trial: Trial, ns: bytes, what: Damage) -> None:
    trial.damage(trial.model.path[ns], what)
    trial.finish({ns})


@both
@pytest.mark.parametrize("what", GENERAL, ids=lambda what: what.name)
def test_b12_the_index(trial: Trial, what: Damage) -> None:
    trial.damage(index.NAME, what)
    assert trial.report.findings
    trial.finish(set())


@both
@pytest.mark.parametrize("what", GENERAL, ids=lambda what: what.name)
@pytest.mark.parametrize("name", ["pion.wal.2", "pion.snapshot.2"])
def test_b1_the_keyspace(trial: Trial, name: str, what: Damage) -> None:
    trial.damage(name, what)
    trial.finish(set(), keys=True)


@closed
@pytest.mark.parametrize("what", GENERAL, ids=lambda what: what.name)
def test_b1_the_file_of_a_large_value(trial: Trial, what: Damage) -> None:
    (path, *_) = sorted((trial.root / "blob").iterdir())
    trial.damage(os.path.relpath(path, trial.root), what)
    trial.finish(set(), keys=True)
