"""The names of a model's arrays and what is sampled from them, against the readable twin."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pion._core import sampling
from pion.ref import sampling as ref

KEYS = st.text("ab_.0", max_size=3)
TREES = st.recursive(
    st.integers() | st.builds(lambda n: np.arange(n), st.integers(0, 3)) | st.none(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4) | st.tuples(inner),
    max_leaves=12,
)


@given(st.lists(TREES, max_size=4) | st.dictionaries(KEYS, TREES, max_size=4))
def test_parameters_are_named_as_by_the_twin(tree: object) -> None:
    found, expected = sampling.parameters(tree, np.ndarray), ref.parameters(tree, np.ndarray)
    assert [name for name, _ in found] == [name for name, _ in expected]
    assert sorted(id(array) for _, array in found) == sorted(id(array) for _, array in expected)


def test_a_key_with_an_underscore_hides_its_own_array_only() -> None:
    array = np.zeros(1)
    tree = {"_a": array, "b": {"_c": {"d": array}, "e": [array, {"_f": array}]}}
    assert [name for name, _ in sampling.parameters(tree, np.ndarray)] == ["b._c.d", "b.e.0"]


@given(
    st.lists(st.binary(max_size=300) | st.integers(0, 99).map(lambda n: np.arange(n, dtype=np.float32)), max_size=5),
    st.integers(2, 7),
    st.integers(0, 64),
)
def test_samples_are_those_of_the_twin(buffers: list[object], count: int, nbytes: int) -> None:
    assert sampling.samples(buffers, count, nbytes) == ref.samples(buffers, count, nbytes)


def test_what_cannot_be_sampled_is_refused() -> None:
    with pytest.raises(ValueError, match="contiguous"):
        sampling.samples([np.zeros((4, 4))[:, ::2]], 4, 8)
    for count, nbytes in ((1, 8), (4, -1)):
        with pytest.raises(ValueError, match="two places"):
            sampling.samples([b"abc"], count, nbytes)
    with pytest.raises(TypeError, match=r"buffer|bytes-like"):
        sampling.samples([3], 4, 8)
