"""The same commands to Pion and to Debian's redis-server: the same replies, the same errors."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pion import testing
from tests.differential import commands as make
from tests.differential.compare import same
from tests.support.redis_peer import redis_server
from tests.support.replies import SocketClient

pytestmark = pytest.mark.compat
EXAMPLES = settings(
    max_examples=int(os.environ.get("PION_DIFFERENTIAL_EXAMPLES", "50")),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)


class Pair:
    """A connection to each of the two servers."""

    def __init__(self, ours: SocketClient, theirs: SocketClient) -> None:
        self.ours, self.theirs = ours, theirs

    def start(self, proto: int) -> None:
        for server in (self.ours, self.theirs):
            server("HELLO", proto)
            server("SELECT", 0)
            server("FLUSHALL")

    def check(self, argv: list[bytes]) -> Any:
        one, other = self.ours(*argv), self.theirs(*argv)
        assert same(argv, one, other), f"{argv}: Pion {one!r}, Redis {other!r}"
        return one


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    with redis_server() as redis, testing.server() as pion:
        ours, theirs = SocketClient((pion.host, pion.port)), SocketClient(redis)
        yield Pair(ours, theirs)
        ours.close()
        theirs.close()


@pytest.mark.parametrize("proto", [2, 3])
@pytest.mark.parametrize(
    "family",
    [make.STRINGS, make.HASHES, make.ZSETS, make.STRINGS + make.HASHES + make.ZSETS],
    ids=["strings", "hashes", "zsets", "all"],
)
@EXAMPLES
@given(data=st.data())
def test_random_commands(pair: Pair, family: list[Any], proto: int, data: st.DataObject) -> None:
    pair.start(proto)
    for argv in data.draw(make.mixed(family, make.GENERIC)):
        pair.check(argv)


@pytest.mark.parametrize("proto", [2, 3])
@EXAMPLES
@given(sequence=st.lists(make.wild, min_size=5, max_size=40))
def test_random_arguments(pair: Pair, proto: int, sequence: list[list[bytes]]) -> None:
    pair.start(proto)
    for argv in sequence:
        pair.check(argv)
