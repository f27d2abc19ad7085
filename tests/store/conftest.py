"""The engine of the tests: a directory of its own, no threads that come by themselves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pion.store.engine import Engine


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    with Engine(tmp_path / "data", ticker=False) as made:
        yield made
