"""B1: random bytes of a directory are flipped, cut, overwritten, inserted, removed or zeroed, several at a time."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pion.store import index
from pion.store.keyspace import files
from tests.faults.damage import Model, splice
from tests.faults.trial import Trial

changes = st.lists(
    st.tuples(
        st.integers(0, 11),  # which file
        st.integers(0, 5),
        st.floats(0, 1),
        st.integers(1, 3000),
        st.binary(min_size=1, max_size=200),
    ),
    min_size=1, max_size=4,
)  # fmt: skip


def _damage_and_start(
    template: tuple[Path, Model], caplog: pytest.LogCaptureFixture, what: list[tuple[int, int, float, int, bytes]]
) -> None:
    root = Path(tempfile.mkdtemp(prefix="pion-damage-"))
    try:
        shutil.copytree(template[0], root / "data")
        trial = Trial(template, root / "data", caplog)
        model = template[1]
        names = {path: {ns} for ns, path in model.path.items()}
        every = [*sorted(names), index.NAME, "pion.wal.2", "pion.snapshot.2"]
        every += sorted(f"blob/{path.name}" for path in (root / "data/blob").iterdir())
        assert files.find(root / "data") == ([2], [2])
        touched: set[bytes] = set()
        keys = False
        for number, kind, at, length, data in what:
            name = every[number % len(every)]
            splice(trial.root / name, kind, at, length, data)
            touched |= names.get(name, set())
            keys |= name not in names and name != index.NAME
        trial.look()
        trial.plain = True  # a cut at the right place is what a kill leaves
        trial.finish(touched, keys=keys, named=False)
    finally:
        shutil.rmtree(root)


Templates = dict[str, tuple[Path, Model]]


def _run(examples: int, template: tuple[Path, Model], caplog: pytest.LogCaptureFixture) -> None:
    @settings(max_examples=examples, deadline=None)
    @given(what=changes)
    def run(what: list[tuple[int, int, float, int, bytes]]) -> None:
        _damage_and_start(template, caplog, what)

    run()


def test_random_damage(templates: Templates, caplog: pytest.LogCaptureFixture) -> None:
    _run(30, templates["killed"], caplog)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["killed", "closed"])
def test_much_random_damage(templates: Templates, caplog: pytest.LogCaptureFixture, name: str) -> None:
    _run(400, templates[name], caplog)
