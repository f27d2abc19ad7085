"""The kernels: name, inputs, outputs, template arguments, grid, threadgroup, portable twin.

All of them write one output ``out``, an array (1, heads, capacity, head_dim) of T: rows 0..count decoded, zeros behind.
Inputs are ``rows``, the stored bytes (uint8), and ``extent``, uint32 numbers that change from call to call and are
therefore no template arguments: each set of those is compiled anew.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Final

from pion.limits import FORMATS
from pion.ref import turbo

__all__ = ["KERNELS", "KEY_ROWS", "Kernel", "Rows", "bits_of", "kernel_of", "key_block_bytes", "text"]

KEY_ROWS: Final = 64  # rows of a block in the key forms

_TURBO: Final = {FORMATS["turbo4"]: 4, FORMATS["turbo3"]: 3, FORMATS["turbo2"]: 2}
_KEYS: Final = {code + 16: bits for code, bits in _TURBO.items()}

Size = tuple[int, int, int]


@dataclass(frozen=True)
class Rows:
    """What is to be decoded into which array.

    Attributes:
        fmt: the format: code, and its parameter from bit 8 on.
        heads, head_dim: a row has heads * head_dim values.
        count: rows wanted.
        capacity: rows of the array, at least `count`.
        skip: key forms: rows of the first block that are not wanted, below 64.
        turned: key forms: the keys carry a rope.
    """

    fmt: int
    heads: int
    head_dim: int
    count: int
    capacity: int
    skip: int = 0
    turned: bool = False

    @property
    def dim(self) -> int:
        """Values of a row."""
        return self.heads * self.head_dim

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Of the array."""
        return 1, self.heads, self.capacity, self.head_dim


Template = Mapping[str, int | bool]


@dataclass(frozen=True)
class Kernel:
    """One kernel.

    Attributes:
        name: also of its file.
        inputs: names of its arguments, in order.
        headers: files in front of it.
        template: its template arguments besides T, the type of the output.
        extent: the numbers in the input of that name.
        threads: threads of a threadgroup, along x.
        grid: all threads, for so many in a threadgroup.
        twin: its name in `pion.metal_kernels.portable`.
    """

    name: str
    inputs: tuple[str, ...]
    headers: tuple[str, ...]
    template: Callable[[Rows], Template]
    extent: Callable[[Rows], tuple[int, ...]]
    threads: Callable[[Rows], int]
    grid: Callable[[Rows, int], Size]
    twin: str

    @property
    def source(self) -> str:
        """The body."""
        return text(self.name)

    @property
    def header(self) -> str:
        """What stands in front of the kernel."""
        return "\n".join(text(name) for name in self.headers)


def text(name: str) -> str:
    """The text of a file of kernels."""
    return resources.files("pion.metal_kernels").joinpath(f"{name}.metal").read_text(encoding="utf-8")


def bits_of(fmt: int) -> int:
    """Bits of a code in a turbo format or a key form; 0 for other formats."""
    return _TURBO.get(fmt & 255) or _KEYS.get(fmt & 255) or 0


def _line(values: int, most: int = 256) -> int:
    """Threads for so many values: whole SIMD groups of 32, at least one."""
    return min(most, max(32, -(-values // 32) * 32))


def _heads(rows: Rows) -> Template:
    return {"H": rows.heads, "D": rows.head_dim}


def _plain(name: str) -> Kernel:
    """A kernel with a thread per value."""
    return Kernel(
        name,
        ("rows", "extent"),
        ("common", "stored"),
        template=_heads,
        extent=lambda rows: (rows.count, rows.capacity),
        threads=lambda rows: _line(rows.dim),
        grid=lambda rows, _: (rows.dim, rows.capacity, 1),
        twin=name,
    )


def _pieces(rows: Rows) -> tuple[int, list[int]]:
    """How a turbo row is split: the number of equal pieces, and the blocks of one."""
    head = rows.fmt >> 8
    pieces = rows.dim // head if head and rows.dim % head == 0 else 1
    sizes = turbo.blocks(rows.dim, head)
    return pieces, sizes[: len(sizes) // pieces]


def _turbo(rows: Rows) -> Template:
    pieces, sizes = _pieces(rows)
    bits = bits_of(rows.fmt)
    codes = sum(-(-bits * size // 8) for size in sizes)
    given = rows.fmt >> 8 and rows.dim % (rows.fmt >> 8) == 0
    return {
        **_heads(rows),
        "BITS": bits,
        "P": rows.dim // pieces,
        "N": max(sizes),
        "MOST": turbo.MOST if given else turbo.BLOCK,
        "BLOCKS": len(sizes),
        "BYTES": codes,
        "CODES": codes * pieces,
        "ROW": turbo.row_bytes(bits, rows.fmt >> 8, rows.dim),
    }


def key_block_bytes(rows: Rows) -> int:
    """Bytes of a block of 64 rows in a key form."""
    return -(-(8 * bits_of(rows.fmt) + 4) * rows.dim // 64) * 64


def _keys(rows: Rows) -> Template:
    bits = bits_of(rows.fmt)
    return {**_heads(rows), "BITS": bits, "BLOCK": key_block_bytes(rows), "TURNED": rows.turned}


def _pairs(rows: Rows) -> int:
    return rows.heads * ((rows.head_dim + 1) // 2)


KERNELS: Final[dict[str, Kernel]] = {
    kernel.name: kernel
    for kernel in (
        _plain("rows_int8"),
        _plain("rows_fp8"),
        _plain("rows_mlx4g32"),
        Kernel(
            "rows_turbo",
            ("rows", "extent"),
            ("common", "turbo"),
            template=_turbo,
            extent=lambda rows: (rows.count, rows.capacity),
            threads=lambda rows: _line(max(_pieces(rows)[1]) // 2),
            grid=lambda rows, threads: (threads, _pieces(rows)[0], rows.capacity),
            twin="rows_turbo",
        ),
        Kernel(
            "keys_turbo",
            ("rows", "turns", "extent"),
            ("common", "stored"),
            template=_keys,
            extent=lambda rows: (rows.skip, rows.count, rows.capacity),
            threads=lambda rows: _line(_pairs(rows)),
            grid=lambda rows, _: (_pairs(rows), rows.capacity, 1),
            twin="keys_turbo",
        ),
    )
}

_BY_CODE: Final = {
    FORMATS["int8"]: "rows_int8",
    FORMATS["fp8"]: "rows_fp8",
    FORMATS["mlx4g32"]: "rows_mlx4g32",
    **dict.fromkeys(_TURBO, "rows_turbo"),
    **dict.fromkeys(_KEYS, "keys_turbo"),
}


def kernel_of(fmt: int) -> Kernel | None:
    """The kernel that decodes a format; None: there is none, the words are plain or the format is rare."""
    name = _BY_CODE.get(fmt & 255)
    return KERNELS[name] if name else None
