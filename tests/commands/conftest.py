"""A dispatcher over a real engine in memory, without a network."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pion.auth import Authenticator
from pion.commands import Dispatcher
from pion.config import Options
from pion.store.engine import Engine
from tests.support.memory import MemoryClient


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine(None, memory_only=True, ticker=False) as made:
        yield made


@pytest.fixture
def dispatcher(engine: Engine) -> Dispatcher:
    return Dispatcher(engine, Options(kvcache=True))


@pytest.fixture
def client(dispatcher: Dispatcher) -> MemoryClient:
    return MemoryClient(dispatcher)


@pytest.fixture
def guarded(engine: Engine) -> Dispatcher:
    return Dispatcher(engine, Options(requirepass="secret"), Authenticator("secret"))
