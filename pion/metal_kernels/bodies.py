"""The attention kernels: names, headers, inputs and outputs with their types.

`attention` fills in template arguments, grids and shapes, and runs them in order. A type "T" is the template argument
of that name; every kernel has it first, also those whose buffers are all of fixed types.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from pion.metal_kernels.table import text

__all__ = ["BODIES", "Body"]


@dataclass(frozen=True)
class Body:
    """One kernel.

    Attributes:
        name: also of its file.
        headers: files in front of it.
        inputs, outputs: types by name, in the order of the arguments.
    """

    name: str
    headers: tuple[str, ...]
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]

    @property
    def source(self) -> str:
        """The body."""
        return text(self.name)

    @property
    def header(self) -> str:
        """What stands in front of the kernel."""
        return "\n".join(text(name) for name in self.headers)


_PARTS: Final = {"parts": "float32", "tops": "float32"}

BODIES: Final[dict[str, Body]] = {
    body.name: body
    for body in (
        Body(
            "attend",
            ("softmax",),
            {
                "q": "float32",
                "k": "T",
                "v": "T",
                "k_suf": "T",
                "v_suf": "T",
                "pick": "int32",
                "counts": "uint32",
                "kv_of": "uint32",
                "extent": "uint32",
            },
            _PARTS,
        ),
        Body(
            "attend_rows",
            ("common", "stored", "turbo", "stored_head", "softmax"),
            {
                "q": "float32",
                "keys": "uint8",
                "values": "uint8",
                "turns": "float32",
                "kv_of": "uint32",
                "extent": "uint32",
            },
            _PARTS,
        ),
        Body("rotate", ("turbo",), {"rows": "float32"}, {"out": "float32"}),
        Body(
            "merge",
            ("softmax",),
            {**_PARTS, "sinks": "float32", "extent": "uint32"},
            {"out": "float32", "lse": "float32"},
        ),
        Body(
            "block_stats",
            (),
            {"k": "T", "extent": "uint32"},
            {"mean": "float32", "low": "float32", "high": "float32"},
        ),
        Body(
            "block_scores",
            (),
            {"q": "float32", "low": "float32", "high": "float32", "kv_of": "uint32", "extent": "uint32"},
            {"scores": "float32"},
        ),
        Body("block_top", (), {"scores": "float32", "extent": "uint32"}, {"out": "int32"}),
    )
}
