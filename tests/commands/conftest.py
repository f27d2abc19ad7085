"""A dispatcher over a real keyspace, without a network."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from pion._core.keyspace import Keyspace

import pion.commands  # registers the families
from pion.auth import Authenticator
from pion.commands.dispatch import Dispatcher
from pion.config import Options
from tests.support.memory import MemoryClient

assert pion.commands


@dataclass
class KeyspaceOnly:
    """As much of an engine as the ordinary commands need."""

    keyspace: Keyspace = field(default_factory=Keyspace)
    saves: int = 0

    def save(self) -> None:
        self.saves += 1


@pytest.fixture
def dispatcher() -> Dispatcher:
    return Dispatcher(KeyspaceOnly(), Options())


@pytest.fixture
def client(dispatcher: Dispatcher) -> MemoryClient:
    return MemoryClient(dispatcher)


@pytest.fixture
def guarded() -> Dispatcher:
    return Dispatcher(KeyspaceOnly(), Options(requirepass="secret"), Authenticator(b"secret"))
