"""A few arrays in one piece of bytes: what is written is read back, what is damaged is refused."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pion.client.payload import DTYPES, Tensor, pack, unpack


def shown(tensors: dict[str, Tensor]) -> dict[str, Any]:
    return {name: (t.dtype, t.words.shape, t.words.dtype, t.words.tobytes()) for name, t in tensors.items()}


@given(st.lists(st.tuples(st.sampled_from(sorted(DTYPES)), st.lists(st.integers(0, 4), max_size=4))), st.text())
def test_what_is_packed_is_unpacked(kinds: list[tuple[str, list[int]]], text: str) -> None:
    random = np.random.default_rng(0)
    tensors = {}
    for at, (dtype, shape) in enumerate(kinds):
        kind = np.dtype(DTYPES[dtype][1])
        count = int(np.prod(shape)) * kind.itemsize
        raw = random.integers(0, 2 if dtype == "bool" else 256, count).astype(np.uint8)
        tensors[f"a{at}"] = Tensor(dtype, raw.view(kind).reshape(shape) if count else np.zeros(shape, kind))
    found, metadata = unpack(pack(tensors, {"text": text}))
    assert shown(found) == shown(tensors)
    assert metadata == {"text": text}


def test_arrays_that_are_not_contiguous_are_written_in_order() -> None:
    array = np.arange(24, dtype="<f4").reshape(2, 3, 4).transpose(2, 0, 1)[::2]
    found, _ = unpack(pack({"a": Tensor("float32", array)}, {}))
    assert found["a"].words.tolist() == array.tolist()


def test_mlx_and_we_read_each_other(tmp_path: Any) -> None:
    mx = pytest.importorskip("mlx.core")
    path = tmp_path / "a.safetensors"
    path.write_bytes(pack({"a": Tensor("bfloat16", np.array([[0x3F80, 0x4000]], "<u2"))}, {"k": "v"}))
    arrays, metadata = mx.load(str(path), return_metadata=True)
    assert (arrays["a"].dtype, arrays["a"].tolist(), metadata) == (mx.bfloat16, [[1.0, 2.0]], {"k": "v"})
    mx.save_safetensors(str(path), {"b": mx.array([1, 2], mx.int32)}, {"x": "y"})
    found, metadata = unpack(path.read_bytes())
    assert (found["b"].dtype, found["b"].words.tolist(), metadata["x"]) == ("int32", [1, 2], "y")


def test_a_dtype_that_is_not_known_is_refused() -> None:
    with pytest.raises(ValueError, match="dtype float64"):
        pack({"a": Tensor("float64", np.zeros(2))}, {})


def header(about: Any, data: bytes = b"") -> bytes:
    text = about if isinstance(about, bytes) else json.dumps(about).encode()
    return len(text).to_bytes(8, "little") + text + data


GOOD = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x01",
        b"\xff" * 8,
        (1 << 40).to_bytes(8, "little") + b"{}",
        header(b"\xff\xff"),
        header(b"[" * 100_000),
        header([]),
        header({"a": 3}),
        header({"a": {**GOOD, "dtype": "F8"}}, bytes(4)),
        header({"a": {**GOOD, "shape": [2]}}, bytes(8)),
        header({"a": {**GOOD, "shape": [-1]}}, bytes(4)),
        header({"a": {**GOOD, "shape": [1.0]}}, bytes(4)),
        header({"a": {**GOOD, "shape": [True]}}, bytes(4)),
        header({"a": {**GOOD, "shape": [1] * 40}}, bytes(4)),
        header({"a": {**GOOD, "data_offsets": [4, 8]}}, bytes(4)),
        header({"a": {**GOOD, "data_offsets": [4, 0]}}, bytes(4)),
        header({"a": GOOD}, bytes(3)),
        header({"a": GOOD, "__metadata__": {"k": 1}}, bytes(4)),
    ],
)
def test_bytes_of_something_else_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError):
        unpack(data)
