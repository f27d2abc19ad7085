"""What an entry says of itself: read back as it was written, refused when it contradicts itself."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pytest

from pion.client.identity import cache_identity, prefix_digest
from pion.client.manifest import Leaf, Manifest, held_tokens, shared

IDENTITY = bytes(range(32))
# Two layers of rows, one window that holds everything, one recurrent state, over three boundaries.
GOOD = Manifest(
    tokens=50,
    identity=IDENTITY.hex(),
    trees=[{"class": "KVCache"}] * 4,
    boundaries=(16, 32, 50),
    leaves=(Leaf(0), Leaf(None, (2,)), Leaf(1), Leaf(None, (3, 4, 5), cut=False)),
)


def test_what_is_packed_is_parsed() -> None:
    assert Manifest.parse(GOOD.pack()) == GOOD
    assert (GOOD.state_count, GOOD.row_layers, GOOD.cuttable) == (6, 2, False)


@pytest.mark.parametrize(
    ("common", "usable"), [(0, 0), (15, 0), (16, 16), (31, 16), (32, 32), (49, 32), (50, 50), (99, 50)]
)
def test_a_state_that_cannot_be_cut_is_used_at_its_boundaries(common: int, usable: int) -> None:
    assert GOOD.usable(common) == usable


def test_what_can_be_cut_is_used_at_any_length() -> None:
    plain = dataclasses.replace(GOOD, boundaries=(50,), leaves=(Leaf(0), Leaf(None, (2,)), Leaf(1)))
    assert [plain.usable(n) for n in (0, 1, 49, 50, 51)] == [0, 1, 49, 50, 50]
    assert plain.states_at(7) == {1: 2}


def test_which_states_are_needed() -> None:
    assert GOOD.states_at(50) == {1: 2, 3: 5}
    assert GOOD.states_at(16) == {1: 2, 3: 3}


def changed(**what: Any) -> bytes:
    return json.dumps({**json.loads(GOOD.pack()), **what}).encode()


@pytest.mark.parametrize(
    "what",
    [
        {"version": 2},
        {"version": None},
        {"tokens": 49},
        {"tokens": "50"},
        {"tokens": True},
        {"boundaries": []},
        {"boundaries": [32, 16, 50]},
        {"boundaries": [16, 16, 50]},
        {"boundaries": [0, 32, 50]},
        {"boundaries": [16.5, 32, 50]},
        {"boundaries": 50},
        {"identity": 3},
        {"slots": "KVCache"},
        {"leaves": [{"rows": 1}]},
        {"leaves": [{"rows": 0}, {"rows": 0}]},
        {"leaves": [{"rows": "x"}]},
        {"leaves": [{"states": [3], "cut": True}]},
        {"leaves": [{"states": [2, 2, 3], "cut": False}]},
        {"leaves": [{"states": [2, 3], "cut": False}]},
        {"leaves": [{"states": [2, 3, 4], "cut": True}]},
        {"leaves": [{"states": [2]}]},
        {"leaves": [{}]},
        {"leaves": {"a": 1}},
        {"leaves": None},
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(what: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        Manifest.parse(changed(**what))


def test_tokens_are_proved_by_the_digest() -> None:
    ids = np.arange(50, dtype="<u4")
    digest = prefix_digest(IDENTITY, ids)
    assert held_tokens(GOOD, ids.tobytes(), digest).tolist() == ids.tolist()
    other = ids.copy()
    other[49] = 7
    for data, told in (
        (other.tobytes(), digest),
        (ids.tobytes(), None),
        (ids.tobytes(), prefix_digest(IDENTITY, other)),
        (ids.tobytes()[:-4], digest),
        (ids.tobytes()[:-1], digest),
        (b"", digest),
    ):
        with pytest.raises(ValueError):
            held_tokens(GOOD, data, told)


def test_shared() -> None:
    assert [shared([1, 2, 3], other) for other in ([], [2], [1], [1, 2, 3], [1, 2, 3, 4], [1, 2, 9])] == [
        0,
        0,
        1,
        3,
        3,
        2,
    ]


def test_another_kind_of_cache_has_another_identity() -> None:
    kinds = {cache_identity(IDENTITY, kind) for kind in ("", "a", "b")}
    assert len(kinds) == 3
    assert cache_identity(IDENTITY, "") == IDENTITY, "plain K/V is what it was"
