"""Between a stored prefix and a prompt-cache file of mlx-lm.

Out of the store: fp16, bf16 and fp32 word for word; mlx4g32 as a ``QuantizedKVCache`` where K and V of a layer are
both in it and heads are multiples of 32; every other format decoded, to fp16, or to bf16 beside layers kept in bf16.

Into the store: floats word for word, a ``QuantizedKVCache`` by its values.

What a file of ours says about itself stands in its metadata under ``pion_...``. The digest among it holds as long as
the arrays are the ones that were exported, which a checksum tells: mlx-lm may have gone on with the cache and saved it
with the same metadata.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final
from urllib.parse import quote_from_bytes, unquote_to_bytes

import numpy as np

from pion.client import cache_files
from pion.client.cache_files import CacheFile, CacheFileError, Float, Layer, Quantized
from pion.client.caches import mlx_modules, words
from pion.client.decode import NUMPY, Decoder
from pion.client.formats import KEPT, described
from pion.client.manifest import Manifest
from pion.wire import raw

__all__ = ["Arrays", "Described", "describe", "export_layers", "import_arrays", "labels", "read_labels"]

_FLOATS: Final = {fmt: dtype for dtype, fmt in KEPT.items()}  # stored format → dtype of the same words
_GROUP: Final = 32

Answer = Callable[[int, int], bytes]
"""(side, layer) → all rows, as the answer to FMT RAW."""


@dataclass(frozen=True)
class Described:
    """What the store says of a prefix.

    Attributes:
        layers: (values per row, format) of each layer of K and of V.
        rows: tokens.
        heads: of a row.
        digest, rope: as registered, if they were.
    """

    layers: tuple[tuple[tuple[int, str], ...], tuple[tuple[int, str], ...]]
    rows: int
    heads: int
    digest: str | None
    rope: float | None


def describe(
    why: str, infos: Sequence[dict[str, str]], heads: int | None = None, manifest: bytes | None = None
) -> Described:
    """What can be exported of a prefix, if it can.

    Args:
        why: what KV.PREFIX.WHY says.
        infos: the lines of V.INFO of K and of V, by name.
        heads: of a row, for a prefix that was registered without HEADS.
        manifest: its state 0, see `manifest`.

    Raises:
        CacheFileError: it is not complete, or a prompt-cache file cannot carry it.
    """
    if not why.startswith("hit"):
        raise CacheFileError(f"the store does not hold it as a whole: {why}")
    keys, values = infos
    if "rows" not in keys:
        raise CacheFileError(
            "it was registered without ROWS and LAYERS, so the store cannot know whether it is complete"
        )
    if (states := int(keys.get("states", 0))) and not _plain_rows(manifest):
        raise CacheFileError(
            f"it holds recurrent state of {states} layers: that is the model's own, no K/V of tokens; use --raw"
        )
    known = heads or int(keys.get("heads", 0))
    if not known and "head_dim" in keys:
        known = int(keys["value_dim"]) // int(keys["head_dim"])
    if not known:
        raise CacheFileError("it was registered without HEADS: say how many K/V heads a row has with --heads")
    layers = described(keys), described(values)
    wrong = sorted({dim for side in layers for dim, _ in side if dim % known})
    if wrong:
        raise CacheFileError(f"rows of {wrong[0]} values are not {known} heads")
    rope = float(keys["rope"]) if "rope" in keys else None
    return Described(layers, int(keys["rows"]), known, keys.get("digest"), rope)


def _plain_rows(manifest: bytes | None) -> bool:
    """Whether the states of an entry say no more than whose rows these are."""
    try:
        return manifest is not None and all(leaf.rows is not None for leaf in Manifest.parse(manifest).leaves)
    except ValueError:  # the first state is a layer's own
        return False


# --- out of the store ------------------------------------------------------------------------------------------------


def export_layers(about: Described, answer: Answer) -> tuple[list[Layer], str]:
    """All layers of a prefix for a file.

    Returns:
        The layers, and the dtype that quantized ones were decoded to, "" when none was.

    Raises:
        CacheFileError: rows are missing, or a value does not fit the dtype it is decoded to.
    """
    exact = {_FLOATS[fmt] for side in about.layers for _, fmt in side if fmt in _FLOATS}
    target = "bfloat16" if exact == {"bfloat16"} else "float16"
    layers: list[Layer] = []
    decoded = False
    for number, (k, v) in enumerate(zip(*about.layers, strict=True)):
        answers = [answer(side, number) for side in (0, 1)]
        if k[1] == v[1] == "mlx4g32" and all(dim // about.heads % _GROUP == 0 for dim in (k[0], v[0])):
            layers.append(Quantized(_quantized(about, answers[0]), _quantized(about, answers[1]), _GROUP, 4))
            continue
        sides = []
        for (dim, fmt), found in zip((k, v), answers, strict=True):
            decoded = decoded or fmt not in _FLOATS
            try:
                sides.append(_float(about, dim, _FLOATS.get(fmt, target), found))
            except ValueError as error:
                raise CacheFileError(f"layer {number} ({fmt}): {error}") from error
        layers.append(Float(*sides))
    return layers, target if decoded else ""


def _parsed(about: Described, answer: bytes) -> raw.Stored:
    stored = raw.parse(answer)
    if (stored.start, stored.rows) != (0, about.rows) or any(segment.missing for segment in stored.segments):
        raise CacheFileError("rows are missing")
    return stored


def _float(about: Described, dim: int, dtype: str, answer: bytes) -> Any:
    mx, _ = mlx_modules()
    stored = _parsed(about, answer)
    size = dim // about.heads
    out = np.empty((1, about.heads, about.rows, size), NUMPY[dtype])
    for first, rows in Decoder(dim, dtype).pieces(stored, memoryview(answer)):
        out[0, :, first : first + len(rows)] = rows.reshape(len(rows), about.heads, size).swapaxes(0, 1)
    array = mx.array(out)
    return array.view(mx.bfloat16) if dtype == "bfloat16" else array


def _quantized(about: Described, answer: bytes) -> tuple[Any, Any, Any]:
    """Stored rows, [codes u32][scales fp16][biases fp16] each, as the three arrays of mlx."""
    mx, _ = mlx_modules()
    stored = _parsed(about, answer)
    parts = [answer[segment.offset : segment.offset + segment.nbytes] for segment in stored.segments]
    table = np.frombuffer(b"".join(parts), np.uint8).reshape(about.rows, -1)
    groups = stored.dim // _GROUP
    ends = (stored.dim // 2, stored.dim // 2 + 2 * groups)
    columns: list[Any] = []
    for piece, kind in zip(np.split(table, ends, axis=1), (np.uint32, np.float16, np.float16), strict=True):
        column = np.ascontiguousarray(piece).view(kind).reshape(about.rows, about.heads, -1)
        columns.append(mx.array(np.ascontiguousarray(column.swapaxes(0, 1))[None]))
    return columns[0], columns[1], columns[2]


# --- what a file says of itself --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Labels:
    """What the metadata of a file says; None where it says nothing.

    Attributes:
        namespace: that it was exported from.
        digest: that its arrays belong to.
        rope: base of the rotary embedding of the keys.
        formats: that K and V were stored in.
        changed: it was exported by Pion, and its arrays are others now: the digest does not hold (and is None).
    """

    namespace: bytes | None = None
    digest: str | None = None
    rope: float | None = None
    formats: tuple[str, str] | None = None
    changed: bool = False


def labels(namespace: bytes, about: Described, layers: Sequence[Layer], decoded: str, version: str) -> dict[str, str]:
    """The metadata that `read_labels` reads."""
    said = {
        "pion_version": version,
        "pion_namespace": quote_from_bytes(namespace, safe=" !\"#$&'()*+,-./:;<=>?@[]^_`{|}~"),
        "pion_rows": str(about.rows),
        "pion_sum": cache_files.checksum(layers),
        "pion_formats": "+".join("/".join(dict.fromkeys(fmt for _, fmt in side)) for side in about.layers),
    }
    if about.digest is not None:
        said["pion_digest"] = about.digest
    if about.rope is not None:
        said["pion_rope"] = repr(about.rope)
    if decoded:
        said["pion_decoded_to"] = decoded
    return said


def read_labels(file: CacheFile) -> Labels:
    """What a file of ours says of itself; nothing for any other file.

    Raises:
        CacheFileError: it says something no writer of ours does.
    """
    said = file.metadata
    if "pion_version" not in said:
        return Labels()
    try:
        k, _, v = said["pion_formats"].partition("+")
        rope = float(said["pion_rope"]) if "pion_rope" in said else None
        found = Labels(unquote_to_bytes(said["pion_namespace"]), said.get("pion_digest"), rope, (k, v))
        intact = int(said["pion_rows"]) == file.rows and said["pion_sum"] == cache_files.checksum(file.layers)
    except (KeyError, ValueError) as error:
        raise CacheFileError(f"its pion metadata is not what Pion writes: {error}") from error
    return found if intact else replace(found, digest=None, changed=True)


# --- into the store --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Arrays:
    """K and V as `pion.Client.store` takes them.

    Attributes:
        k, v: layers of ``(heads, tokens, head_dim)``; uint16 words for bfloat16.
        dtype: of the values.
        decoded: layers that were a ``QuantizedKVCache``.
    """

    k: list[Any]
    v: list[Any]
    dtype: str
    decoded: int

    @property
    def stored_as(self) -> str:
        """The format that keeps every word."""
        return KEPT[self.dtype]


def import_arrays(file: CacheFile) -> Arrays:
    """The arrays of a file.

    Raises:
        CacheFileError: layers, or K and V, differ in shape or dtype, which the store's clients do not expect.
    """
    floats = [layer.decoded() if isinstance(layer, Quantized) else layer for layer in file.layers]
    mx, _ = mlx_modules()
    mx.eval([array for layer in floats for array in (layer.keys, layer.values)])
    kinds = {(a.shape[1], a.shape[3], str(a.dtype).rpartition(".")[2]) for c in floats for a in (c.keys, c.values)}
    if len(kinds) != 1:
        shown = ", ".join(f"{heads} heads x {size} {dtype}" for heads, size, dtype in sorted(kinds))
        raise CacheFileError(f"layers, or K and V, differ: {shown}; a prefix is stored with equal ones only")
    _, _, dtype = kinds.pop()
    k, v = ([_as_numpy(a, dtype) for a in side] for side in zip(*((c.keys, c.values) for c in floats), strict=True))
    return Arrays(k, v, dtype, sum(isinstance(layer, Quantized) for layer in file.layers))


def _as_numpy(array: Any, dtype: str) -> Any:
    seen = words(array)[0]
    return seen.view(np.float16) if dtype == "float16" else seen
