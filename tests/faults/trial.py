"""One damaged copy of a directory: started, compared with the model, used, and started again."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest

from pion.store.engine import Engine
from pion.tools.check import Report, check
from tests.faults.damage import DIM, ROWS, Damage, Model, ask, keys_of
from tests.store.model import F16, words
from tests.store.support import fill

NEW = b"new"


class Trial:
    """A copy of a template in `root`."""

    def __init__(self, template: tuple[Path, Model], root: Path, caplog: pytest.LogCaptureFixture) -> None:
        if not root.exists():
            shutil.copytree(template[0], root)
        self.root, self.model, self.caplog = root, template[1], caplog
        self.report = Report()
        self.names: list[str] = []  # of what was damaged
        self.plain = False

    def damage(self, path: str, what: Damage) -> None:
        """Do it, and note what `pion check` says."""
        what.do(self.root / path)
        self.names.append(Path(path).name)
        self.plain = what.plain
        self.look()

    def look(self) -> None:
        """Ask `pion check`."""
        self.report = check(self.root)

    def start(self) -> Engine:
        """An engine whose keyspace is written anew when it was damaged, as a server does within a second."""
        self.caplog.clear()
        self.caplog.set_level(logging.INFO)
        engine = Engine(self.root, ticker=False)
        store = engine.keyspace_store
        assert store is not None
        store.tick()
        while store.rewriting:
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
        return same and all(found.get(key) == history[-1] for key, history in model.keys.items())

    def finish(self, touched: set[bytes], *, keys: bool = False, named: bool = True) -> None:
        """Start, compare, use, start again.

        Args:
            touched: namespaces whose files are damaged.
            keys: files of the keyspace are.
            named: the damaged file must be named in the log when something is missing.
        """
        engine = self.start()
        try:
            same = self.compare(engine, touched, keys=keys)
            told = self.caplog.text
            aside, quarantined = engine.set_aside(), engine.info()["vstore_quarantined"]
            if not same:
                assert told
                assert not named or any(name in told for name in self.names), "what is missing is told"
                # else it was padding, or a record that later ones replace
                assert self.report.problems or (self.plain and self.report.findings), "pion check sees it"
            for path in aside:
                assert (self.root / path).exists() or (self.root / path).is_symlink(), path
            assert quarantined == 0 or any(path.startswith("quarantine/") for path in aside)
            fill(engine, NEW, ROWS, 1)
            engine.keyspace.set(0, NEW, b"value")
            engine.keyspace.flush_log()
            answers = {place: ask(engine, place) for ns in touched for place in self.model.places(ns)}
            before = keys_of(engine)
        finally:
            engine.close()
        after = check(self.root)
        assert not after.problems, [str(item) for item in after.findings]
        engine = self.start()
        try:
            assert {place: ask(engine, place) for place in answers} == answers
            assert keys_of(engine) == before
            assert ask(engine, (NEW + b"_pk", 0)) == words(ROWS, ROWS, DIM, F16)
            assert engine.lookup(NEW)
        finally:
            engine.close()
