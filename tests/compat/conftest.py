"""A real server per module, without and with a password."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pion import testing

PASSWORD = "correct horse"


@pytest.fixture(scope="module")
def server() -> Iterator[testing.Server]:
    with testing.server("--kvcache") as running:
        yield running


@pytest.fixture(scope="module")
def guarded() -> Iterator[testing.Server]:
    with testing.server("--kvcache", "--requirepass", PASSWORD) as running:
        yield running
