"""Running a kernel: on a Metal device, or on whatever a test puts in its place."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

from numpy.typing import NDArray

from pion.metal_kernels.bodies import BODIES, Body

__all__ = ["Device", "Metal", "Template"]

Template = Mapping[str, int | bool | str]

# MLX puts arrays below this size into constant memory, which makes it another kernel: two calls that differ in that
# would compile each other's away. So none are.
_LEAST: Final = 8


class Device(Protocol):
    """Where kernels run. Arrays are the device's own; kernels read and write them in row-major order."""

    def array(self, values: NDArray[Any]) -> Any:
        """An array of the device."""
        ...

    def kind(self, array: Any) -> str:
        """float32, float16 or bfloat16."""
        ...

    def with_ones(self, array: Any) -> Any:
        """An array (..., 2): each value, and a one behind it."""
        ...

    def call(
        self,
        body: Body,
        template: Template,
        inputs: Mapping[str, Any],
        grid: tuple[int, int, int],
        threads: int,
        shapes: Sequence[tuple[int, ...]],
    ) -> list[Any]:
        """Run a kernel.

        Args:
            body: the kernel.
            template: its arguments, T first, by the name of the dtype.
            inputs: arrays by name.
            grid: threads in all, along x, y and z.
            threads: of a threadgroup, along x.
            shapes: of the outputs.

        Returns:
            The outputs.
        """
        ...


class Metal:
    """MLX's default device, which has Metal."""

    def array(self, values: NDArray[Any]) -> Any:
        """An array of mlx."""
        import mlx.core as mx

        return mx.array(values)

    def kind(self, array: Any) -> str:
        """The dtype's name."""
        return str(array.dtype).rpartition(".")[2]

    def with_ones(self, array: Any) -> Any:
        """An array (..., 2)."""
        import mlx.core as mx

        return mx.stack([array, mx.ones_like(array)], axis=-1)

    def call(
        self,
        body: Body,
        template: Template,
        inputs: Mapping[str, Any],
        grid: tuple[int, int, int],
        threads: int,
        shapes: Sequence[tuple[int, ...]],
    ) -> list[Any]:
        """As `Device.call`; the outputs are not evaluated yet."""
        import mlx.core as mx

        types = {"T": getattr(mx, str(template["T"]))}
        outs: list[Any] = _built(body.name)(
            inputs=[_large(inputs[name]) for name in body.inputs],
            template=[(name, types.get(name, value)) for name, value in template.items()],
            grid=grid,
            threadgroup=(threads, 1, 1),
            output_shapes=list(shapes),
            output_dtypes=[types["T"] if kind == "T" else getattr(mx, kind) for kind in body.outputs.values()],
        )
        return outs


def _large(array: Any) -> Any:
    """An array of at least eight elements."""
    import mlx.core as mx

    return mx.pad(array.reshape(-1), (0, _LEAST - array.size)) if array.size < _LEAST else array


@functools.cache
def _built(name: str) -> Any:
    import mlx.core as mx

    body = BODIES[name]
    return mx.fast.metal_kernel(
        name=f"pion_{name}",
        input_names=list(body.inputs),
        output_names=list(body.outputs),
        source=body.source,
        header=body.header,
    )
