"""The tree of prefixes against its twin, under every order of adding and removing."""

from __future__ import annotations

import random
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pion._core.prefixtree import MAX_FOUND, PrefixTree
from pion.ref import prefixtree as ref


def packed(*hashes: int) -> bytes:
    return struct.pack(f"<{len(hashes)}Q", *hashes)


def check(tree: PrefixTree, twin: ref.PrefixTree, asked: bytes) -> None:
    found = tree.match(asked, MAX_FOUND)
    assert dict(found) == twin.shared(asked)
    assert len(dict(found)) == len(found)
    assert [shared for _, shared in found] == sorted((shared for _, shared in found), reverse=True)
    assert tree.match(asked, 2) == found[:2]


PATHS = st.lists(st.integers(0, 2), max_size=5).map(lambda path: packed(*path))


@settings(max_examples=400)
@given(st.lists(st.tuples(st.integers(0, 9), st.none() | PATHS), max_size=40), PATHS)
def test_like_the_twin(steps: list[tuple[int, bytes | None]], asked: bytes) -> None:
    tree, twin = PrefixTree(), ref.PrefixTree()
    for number, path in steps:
        if path is None:
            tree.remove(number)
            twin.remove(number)
        else:
            tree.add(number, path)
            twin.add(number, path)
        assert len(tree) == len(twin)
        check(tree, twin, asked)


def test_many_prefixes_come_and_go() -> None:
    rng = random.Random(5)
    tree, twin = PrefixTree(), ref.PrefixTree()
    paths = []
    for number in range(600):
        stem = rng.choice(paths)[: rng.randrange(12)] if paths and rng.random() < 0.8 else ()
        path = (*stem, *(rng.getrandbits(64) for _ in range(rng.randrange(1, 20))))
        paths.append(path)
        tree.add(number, packed(*path))
        twin.add(number, packed(*path))
    for path in rng.sample(paths, 40):
        check(tree, twin, packed(*path, 1))
    for number in rng.sample(range(600), 500):
        tree.remove(number)
        twin.remove(number)
    assert len(tree) == len(twin)
    for path in rng.sample(paths, 40):
        check(tree, twin, packed(*path))
    for number in range(600):
        tree.remove(number)
    assert len(tree) == 0
    assert tree.match(packed(*paths[0])) == []


def test_a_prefix_that_ends_within_comes_before_those_that_go_on() -> None:
    tree = PrefixTree()
    tree.add(0, packed(1, 2, 3))
    tree.add(1, packed(1, 2))
    tree.add(2, packed(1, 9))
    assert tree.match(packed(1, 2, 4)) == [(1, 2), (0, 2), (2, 1)]


def test_equal_hashes_behind_other_blocks_are_not_confused() -> None:
    tree = PrefixTree()
    tree.add(0, packed(1, 7))
    tree.add(1, packed(2, 7))
    assert tree.match(packed(1, 7)) == [(0, 2)]
    assert tree.match(packed(7)) == []


def test_bad_arguments() -> None:
    tree = PrefixTree()
    with pytest.raises(ValueError, match="9 bytes are not whole hashes"):
        tree.add(0, bytes(9))
    with pytest.raises(ValueError, match="9 bytes are not whole hashes"):
        tree.match(bytes(9))
    with pytest.raises(ValueError, match="below 2"):
        tree.add(1 << 31, bytes(8))
    with pytest.raises(ValueError, match="at most 4096"):
        tree.match(bytes(8), 5000)
    tree.add(3, b"")
    assert tree.match(packed(1)) == []
