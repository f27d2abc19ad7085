"""A `Device` of `pion.metal_kernels` that runs the kernels in the emulator, on numpy arrays (bfloat16 as uint16)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from pion.metal_kernels.bodies import Body
from pion.metal_kernels.device import Template
from tests.metal.emulator import Array, Library, words

KINDS = {"float32": "float32", "float16": "float16", "uint16": "bfloat16"}


def _key(body: Body, template: Template) -> tuple[Any, ...]:
    return (body.name, *template.items())


class Emulated:
    """Runs kernels, which `prepare` must have compiled or which are compiled one by one.

    Attributes:
        order: of the threads: 0 forward, 1 reverse, more = seed of a shuffle.
        change: applied to the text of the bodies and headers, by name, to plant faults.
        own: what was compiled for this device alone, because the change concerns it or because all is (`alone`).
    """

    shared: dict[tuple[Any, ...], Library] = {}  # noqa: RUF012 - all devices share what was compiled

    def __init__(self, order: int = 0, change: Callable[[str, str], str] | None = None, *, alone: bool = False) -> None:
        self.order, self.alone = order, alone
        self.change = change or (lambda name, text: text)
        self.own: dict[tuple[Any, ...], Library] = {}

    def libraries(self, body: Body) -> dict[tuple[Any, ...], Library]:
        """Where a kernel is, or will be."""
        texts = [(body.name, body.source), (f"{body.name}.h", body.header)]
        changed = any(self.change(name, text) != text for name, text in texts)
        return self.own if self.alone or changed else self.shared

    def array(self, values: Array) -> Array:
        return values

    def kind(self, array: Array) -> str:
        return KINDS[array.dtype.name]

    def with_ones(self, array: Array) -> Array:
        return np.stack([array, np.ones_like(array)], axis=-1)

    def compile(self, body: Body, templates: Sequence[Template]) -> None:
        library = Library(
            self.change(body.name, body.source),
            self.change(f"{body.name}.h", body.header),
            body.inputs,
            templates,
            body.name,
            body.outputs,
        )
        for template in templates:
            self.libraries(body)[_key(body, template)] = library

    def call(
        self,
        body: Body,
        template: Template,
        inputs: Mapping[str, Array],
        grid: tuple[int, int, int],
        threads: int,
        shapes: Sequence[tuple[int, ...]],
    ) -> list[Array]:
        key = _key(body, template)
        if key not in self.libraries(body):
            self.compile(body, [template])
        return self.libraries(body)[key].run_all(template, inputs, shapes, grid, threads, self.order)


class OnMlx(Emulated):
    """Takes and gives arrays of mlx, as Metal does."""

    def array(self, values: Array) -> Any:
        import mlx.core as mx

        return mx.array(values)

    def kind(self, array: Any) -> str:
        return str(array.dtype).rpartition(".")[2]

    def call(
        self,
        body: Body,
        template: Template,
        inputs: Mapping[str, Any],
        grid: tuple[int, int, int],
        threads: int,
        shapes: Sequence[tuple[int, ...]],
    ) -> list[Any]:
        import mlx.core as mx

        given = {name: np.array(array) for name, array in inputs.items()}
        return [mx.array(out) for out in super().call(body, template, given, grid, threads, shapes)]


class Recorder(Emulated):
    """Runs nothing and notes which kernels would run."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, tuple[Body, dict[tuple[Any, ...], Template]]] = {}

    def call(
        self,
        body: Body,
        template: Template,
        inputs: Mapping[str, Array],
        grid: tuple[int, int, int],
        threads: int,
        shapes: Sequence[tuple[int, ...]],
    ) -> list[Array]:
        del inputs, grid, threads
        self.seen.setdefault(body.name, (body, {}))[1][_key(body, template)] = template
        return [
            np.zeros(shape, words(kind, template)) for kind, shape in zip(body.outputs.values(), shapes, strict=True)
        ]


def prepare(device: Emulated, calls: Sequence[Callable[[Any], Any]]) -> None:
    """Compile for a device all kernels of some calls, each body once."""
    recorder = Recorder()
    for call in calls:
        call(recorder)
    for body, templates in recorder.seen.values():
        missing = [template for key, template in templates.items() if key not in device.libraries(body)]
        if missing:
            device.compile(body, missing)
