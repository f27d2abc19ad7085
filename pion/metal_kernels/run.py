"""Choosing and calling a kernel."""

from __future__ import annotations

import functools
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from pion.metal_kernels import portable
from pion.metal_kernels.table import KERNELS, KEY_ROWS, Rows, kernel_of
from pion.ref import quant_keys

__all__ = ["BACKENDS", "angles", "backend", "decode"]

BACKENDS: Final = ("metal", "ops")

F32 = NDArray[np.float32]


def backend() -> str | None:
    """How this machine decodes into mlx arrays: ``metal``, ``ops`` on another GPU, None on a CPU, whose compiled
    decoders are faster than mlx's operations."""
    import mlx.core as mx

    if mx.default_device().type != mx.DeviceType.gpu:
        return None
    return "metal" if mx.metal.is_available() else "ops"


@functools.cache
def _built(name: str) -> Any:
    import mlx.core as mx

    kernel = KERNELS[name]
    return mx.fast.metal_kernel(
        name=f"pion_{name}",
        input_names=list(kernel.inputs),
        output_names=["out"],
        source=kernel.source,
        header=kernel.header,
    )


def decode(data: Any, rows: Rows, dtype: Any, *, turns: Any = None, how: str = "metal") -> Any:
    """Decode stored rows into an array of mlx.

    Args:
        data: uint8 array, the stored bytes of the rows; for key forms, of whole blocks.
        rows: what they are and where they go.
        dtype: of the result: float16, bfloat16 or float32.
        turns: key forms with a rope: `angles` of the rows wanted, as an mlx array.
        how: one of `BACKENDS`.

    Returns:
        An array (1, heads, capacity, head_dim), not yet evaluated.

    Raises:
        ValueError: no kernel for the format.
        RuntimeError: Metal is asked for and not there.
    """
    import mlx.core as mx

    kernel = kernel_of(rows.fmt)
    if kernel is None:
        raise ValueError(f"no kernel decodes format {rows.fmt & 255}")
    inputs: dict[str, Any] = {"rows": data}
    if "turns" in kernel.inputs:
        inputs["turns"] = mx.zeros((1,), mx.float32) if turns is None else turns
    if how == "ops":
        more = inputs.get("turns")
        twin = getattr(portable, kernel.twin)
        return twin(data, rows, dtype) if more is None else twin(data, rows, dtype, more)
    inputs["extent"] = mx.array(kernel.extent(rows), mx.uint32)
    threads = kernel.threads(rows)
    (out,) = _built(kernel.name)(
        inputs=[inputs[name] for name in kernel.inputs],
        template=[("T", dtype), *kernel.template(rows).items()],
        grid=kernel.grid(rows, threads),
        threadgroup=(threads, 1, 1),
        output_shapes=[rows.shape],
        output_dtypes=[dtype],
    )
    return out


def angles(first: int, count: int, theta: float, head_dim: int) -> F32:
    """The turns of the rope at `count` positions from `first` on, as the key forms define them.

    A block's first row is turned by its own angle, each later one by a product with the step's; so positions are
    computed from the start of their block of 64.

    Returns:
        (count, 2, head_dim // 2): cosines, sines.
    """
    start = first // KEY_ROWS * KEY_ROWS
    blocks = -(-(first + count - start) // KEY_ROWS)
    pair = np.arange(head_dim // 2, dtype=np.float64)
    step = quant_keys.exp2(-(2.0 * pair / float(head_dim)) * quant_keys.log2(theta)) * 0.15915494309189535
    positions = start + KEY_ROWS * np.arange(blocks, dtype=np.float64)
    step_c, step_s = quant_keys.cos_sin(step)
    c, s = quant_keys.cos_sin(positions[:, None] * step)
    table = np.empty((blocks, KEY_ROWS, 2, len(pair)), np.float32)
    for row in range(KEY_ROWS):
        table[:, row, 0], table[:, row, 1] = c, s
        c, s = c * step_c - s * step_s, c * step_s + s * step_c
    return table.reshape(blocks * KEY_ROWS, 2, len(pair))[first - start :][:count]
