"""A few arrays in one piece of bytes: the safetensors layout, written and read here.

Layout: u64 little-endian length of a JSON header, the header padded with spaces to a multiple of 8, then the arrays one
behind the other, C order, little endian. The header maps names to ``{"dtype", "shape", "data_offsets"}``, and
``__metadata__`` to a map of texts. Nothing in it is ever executed or imported; what is read is checked in full, since
it comes from elsewhere.

Source: the format's description in the README of github.com/huggingface/safetensors.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

__all__ = ["Tensor", "pack", "unpack"]

#: dtype of mlx → (name in the file, dtype of its words in numpy, which knows no bfloat16).
DTYPES: Final[dict[str, tuple[str, str]]] = {
    "bool": ("BOOL", "|b1"),
    "uint8": ("U8", "|u1"),
    "int8": ("I8", "|i1"),
    "uint16": ("U16", "<u2"),
    "int16": ("I16", "<i2"),
    "float16": ("F16", "<f2"),
    "bfloat16": ("BF16", "<u2"),
    "uint32": ("U32", "<u4"),
    "int32": ("I32", "<i4"),
    "float32": ("F32", "<f4"),
    "uint64": ("U64", "<u8"),
    "int64": ("I64", "<i8"),
    "complex64": ("C64", "<c8"),
}
_NAMES: Final = {told: name for name, (told, _) in DTYPES.items()}
_HEADER_MAX: Final = 1 << 20
_DIMENSIONS_MAX: Final = 16
_LENGTH_MAX: Final = (1 << 31) - 1  # of a dimension, also where another one is 0: mlx counts in i32


@dataclass(frozen=True)
class Tensor:
    """An array.

    Attributes:
        dtype: mlx's name of it, e.g. ``bfloat16``.
        words: any shape; u16 for bfloat16.
    """

    dtype: str
    words: np.ndarray[Any, Any]


def pack(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytearray:
    """The bytes of some arrays.

    Raises:
        ValueError: a dtype that the layout does not know.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES:
            raise ValueError(f"array {name} has dtype {tensor.dtype} (want one of {', '.join(DTYPES)})")
        start, end = end, end + tensor.words.nbytes
        about = {"dtype": DTYPES[tensor.dtype][0], "shape": list(tensor.words.shape), "data_offsets": [start, end]}
        header[name] = about
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    out = bytearray(8 + len(text) + end)
    out[:8] = len(text).to_bytes(8, "little")
    out[8 : 8 + len(text)] = text
    at = 8 + len(text)
    for tensor in tensors.values():
        words = tensor.words
        place = np.frombuffer(out, words.dtype, words.size, at) if words.size else words.reshape(-1)
        np.copyto(place.reshape(words.shape), words)
        at += words.nbytes
    return out


def unpack(data: Any) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The arrays and the metadata in some bytes; the arrays are views into them, not always aligned.

    Raises:
        ValueError: these are not the bytes of some arrays.
    """
    view = memoryview(data).cast("B")
    length = int.from_bytes(view[:8], "little")
    if len(view) < 8 or length > min(_HEADER_MAX, len(view) - 8):
        raise ValueError("a payload without a whole header")
    try:
        header = json.loads(bytes(view[8 : 8 + length]))
        metadata = header.pop("__metadata__", {})
        found = {name: _tensor(view[8 + length :], about) for name, about in header.items()}
    except (KeyError, TypeError, AttributeError, RecursionError, ArithmeticError, MemoryError) as error:
        raise ValueError(f"a payload whose header is not understood: {error!r}") from error
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise ValueError("a payload whose metadata is no map of texts")
    return found, metadata


def _tensor(data: memoryview, about: dict[str, Any]) -> Tensor:
    name, kind = _NAMES[about["dtype"]], np.dtype(DTYPES[_NAMES[about["dtype"]]][1])
    shape, (start, end) = about["shape"], about["data_offsets"]
    numbers = [*shape, start, end]
    if len(shape) > _DIMENSIONS_MAX or not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError("a payload with a shape or a place that is no number")
    if max(shape, default=0) > _LENGTH_MAX or math.prod(length for length in shape if length) > _LENGTH_MAX:
        raise ValueError("a payload with an array larger than there are")
    if not start <= end <= len(data) or end - start != math.prod(shape) * kind.itemsize:
        raise ValueError(f"a payload in which {shape} values of {name} do not have their place")
    return Tensor(name, np.frombuffer(data[start:end], kind).reshape(shape))
