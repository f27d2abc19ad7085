"""Keys of prefixes and block hashes."""

from __future__ import annotations

import hashlib
import itertools
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pion.client.namespace import hash_block, hash_blocks, legacy_namespace, make_namespace, token_array

PROGRAM = """
from pion import hash_block, make_namespace
from pion.client.namespace import hash_blocks
print(make_namespace("llama", "tok|x", None, "fp16", "", "prompt é"), hash_block([1, 2, 3]), hash_blocks(range(200)))
"""


@pytest.mark.parametrize("parts", [("llama-3.2-1b-4bit", "fp16", "You are"), ("é", "", "日本"), ("one",)])
def test_ordinary_parts_give_the_published_key(parts: tuple[str, ...]) -> None:
    assert (
        make_namespace(*parts) == hashlib.sha256("|".join(parts).encode()).hexdigest()[:32] == legacy_namespace(*parts)
    )


def test_g2_parts_that_join_alike_give_different_keys() -> None:
    keys = [
        make_namespace("x|y", "z"),
        make_namespace("x", "y|z"),
        make_namespace("x", "y", "z"),
        make_namespace("x\\", "y", "z"),
        make_namespace("x\\|y", "z"),
        make_namespace("fp16|", ""),
        make_namespace("fp16", "|"),
        make_namespace("fp16", "", ""),
        make_namespace("a", None),
        make_namespace("a", ""),
        make_namespace("a", "\\N"),
        make_namespace("a", "None"),
        make_namespace("a"),
    ]
    assert len(set(keys)) == len(keys)


PART = st.one_of(st.none(), st.text(alphabet="a|\\N", max_size=4))


@given(st.lists(PART, min_size=1, max_size=4), st.lists(PART, min_size=1, max_size=4))
def test_g2_injective(one: list[str | None], other: list[str | None]) -> None:
    assert (make_namespace(*one) == make_namespace(*other)) == (one == other)


def test_parts_of_other_types_are_refused() -> None:
    with pytest.raises(TypeError, match="part 1 of a namespace must be str or None, not float"):
        make_namespace("a", 10000.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least one part"):
        make_namespace()


def test_d14_equal_in_processes_with_other_hash_seeds() -> None:
    seen = {
        subprocess.run(
            [sys.executable, "-c", PROGRAM],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "4242")
    }
    assert len(seen) == 1
    first = make_namespace("llama", "tok|x", None, "fp16", "", "prompt é")
    assert seen.pop() == f"{first} {hash_block([1, 2, 3])} {hash_blocks(range(200))}\n"


def test_hash_block_is_pinned() -> None:
    """Typed from the definition: BLAKE2b-64 over parent u64 and ids u32, little endian; stored tables depend on it."""
    raw = (7).to_bytes(8, "little") + b"".join(i.to_bytes(4, "little") for i in (1, 2, 70000))
    want = hashlib.blake2b(raw, digest_size=8, person=b"pion block").digest()
    assert hash_block([1, 2, 70000], parent=7) == int.from_bytes(want, "little")


def test_hash_blocks_chains_full_blocks_only() -> None:
    ids = list(range(150))
    first = hash_block(ids[:64])
    assert hash_blocks(ids) == [first, hash_block(ids[64:128], first)]
    assert hash_blocks(ids[:63]) == []
    changed = hash_blocks([99, *ids[1:]])
    assert all(a != b for a, b in itertools.zip_longest(hash_blocks(ids), changed))
    with pytest.raises(ValueError, match="block_size"):
        hash_blocks(ids, 0)


def test_token_array() -> None:
    assert token_array([]).size == 0
    assert token_array(np.array([1, 2], np.int64)).tolist() == [1, 2]
    assert token_array(range(3)).dtype == np.dtype("<u4")
    for bad, error in (
        ([[1]], ValueError),
        ([-1], ValueError),
        ([1 << 32], ValueError),
        ([1.5], TypeError),
        (["a"], TypeError),
    ):
        with pytest.raises(error):
            token_array(bad)
