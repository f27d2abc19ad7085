"""The three ways every (bytes, values) pair of a parser is checked, as h11 does it."""

from collections.abc import Callable
from typing import Any

import pytest

Feed = Callable[[bytes], list[Any]]
ThreeWay = Callable[[Callable[[], Feed], bytes, list[Any]], None]


@pytest.fixture
def three_way() -> ThreeWay:
    """``check(make, data, values)``: fed whole, byte by byte, and with the start of another frame behind it.

    Fed byte by byte, a parser must give nothing for a single frame until its last byte.
    """

    def check(make: Callable[[], Feed], data: bytes, values: list[Any]) -> None:
        assert repr(make()(data)) == repr(values)
        feed = make()
        got = [feed(data[i : i + 1]) for i in range(len(data))]
        assert repr([value for part in got for value in part]) == repr(values)
        if len(values) == 1:
            assert not any(got[:-1])
        feed = make()
        assert repr(feed(data + b"*1\r\n$3\r\na")) == repr(values)
        assert len(feed(b"bc\r\n")) == 1

    return check
