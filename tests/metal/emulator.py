"""Kernels of `pion.metal_kernels` on the CPU: their text goes through g++ with `metal_shim.h` in front.

mlx makes a function around a kernel's body; so does this module, with buffers that check their indices.
"""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from pion.metal_kernels import Kernel
from tests.support.peers import program

HERE: Final = Path(__file__).parent
TYPES: Final = {"float16": "half", "bfloat16": "bfloat16_t", "float32": "float"}
WORDS: Final[dict[str, Any]] = {"float16": np.float16, "bfloat16": np.uint16, "float32": np.float32}
# Types of buffers by the names mlx has for them; "T" is the template argument.
_BUFFERS: Final = {**TYPES, "uint8": "uint8_t", "uint32": "uint32_t", "int32": "int32_t"}
_DECLARED: Final = re.compile(r"\bthreadgroup\s+(\w+)\s+(\w+)\s*\[([^\]]+)\]\s*;")
_POINTER: Final = re.compile(r"\bthreadgroup\s+(\w+)\s*\*")
_SIZES: Final = {"float": 4, "uint": 4, "int": 4, "half": 2, "ushort": 2, "uchar": 1}
THREADGROUP_LIMIT: Final = 32 << 10

Template = Mapping[str, Any]
Array = np.ndarray[Any, Any]
OUT: Final = {"out": "T"}


class KernelError(Exception):
    """The kernel does not compile, or did something no kernel may do while it ran."""


def threadgroup_bytes(source: str, template: Template) -> int:
    """Bytes of the threadgroup arrays that a body declares, aligned to 16 each, for these template arguments."""
    total = 0
    for kind, _, size in _DECLARED.findall(source):
        total = -(-total // 16) * 16 + _SIZES[kind] * int(eval(size, {}, dict(template)))
    return total


def _literal(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return TYPES.get(value, str(value))


def _arguments(template: Template) -> str:
    return ", ".join(_literal(value) for value in template.values())


def words(kind: str, template: Template) -> np.dtype[Any]:
    """The numpy dtype of a buffer; bfloat16 is uint16 there."""
    name = template["T"] if kind == "T" else kind
    return np.dtype(WORDS.get(name, name))


def program_text(
    source: str,
    header: str,
    inputs: Mapping[str, str],
    instances: Sequence[Template],
    name: str = "kernel",
    outputs: Mapping[str, str] = OUT,
) -> str:
    """C++ for a kernel: one exported function for each set of template arguments.

    Args:
        source, header: of the kernel.
        inputs: dtype by name.
        instances: template arguments, the type T first, by the names mlx has for dtypes.
        name: of the file that compilers' messages speak of.
        outputs: dtype by name.
    """
    numbers = iter(range(16))
    body = _DECLARED.sub(
        lambda m: f'const auto {m[2]} = emu::share<{m[1]}, {m[3]}>({next(numbers)}, "{m[2]}");', source
    )
    header = _POINTER.sub(r"emu::Span<\1> ", header)
    kinds = {
        key: "typename" if key == "T" else "bool" if isinstance(v, bool) else "int" for key, v in instances[0].items()
    }
    declared = ", ".join(f"{kind} {key}" for key, kind in kinds.items())
    buffers = [(key, _BUFFERS.get(kind, kind), "const ") for key, kind in inputs.items()]
    buffers += [(key, _BUFFERS.get(kind, kind), "") for key, kind in outputs.items()]
    spans = ", ".join(f"emu::Span<{const}{kind}> {key}" for key, kind, const in buffers)
    lines = [
        '#include "metal_shim.h"',
        "#pragma GCC poison double new delete throw goto",  # no part of MSL
        "struct Call { void *const *data; const size_t *size; };",
        f'#line 1 "{name}.h"',
        header,
        f"template <{declared}> static void body({spans}) {{",
        f'#line 1 "{name}.metal"',
        body,
        "}",
        f'#line 1 "{name}.launch"',
    ]
    for number, template in enumerate(instances):
        own = _literal(template["T"])
        given = ", ".join(
            f'{{static_cast<{const}{own if kind == "T" else kind} *>(call.data[{i}]), call.size[{i}], "{key}"}}'
            for i, (key, kind, const) in enumerate(buffers)
        )
        lines += [
            f"static void body_{number}(void *argument) {{",
            "  const Call &call = *static_cast<const Call *>(argument);",
            f"  body<{_arguments(template)}>({given});",
            "}",
            f'extern "C" const char *launch_{number}(void *const *data, const size_t *size, const uint *grid,'
            " const uint *group, uint order) {",
            "  Call call = {data, size};",
            f"  return emu::run(grid, group, order, body_{number}, &call);",
            "}",
        ]
    return "\n".join([*lines, 'extern "C" size_t shared_most() { return emu::shared_most; }', ""])


class Library:
    """A kernel, compiled for several sets of template arguments.

    Raises:
        KernelError: g++ refused it; the text is its message.
    """

    def __init__(
        self,
        source: str,
        header: str,
        inputs: Mapping[str, str],
        instances: Sequence[Template],
        name: str = "kernel",
        outputs: Mapping[str, str] = OUT,
    ) -> None:
        self.inputs, self.outputs = dict(inputs), dict(outputs)
        self.instances = [dict(template) for template in instances]
        compiler = program("g++")
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, f"{name}.cpp")
            path.write_text(program_text(source, header, inputs, instances, name, outputs), encoding="utf-8")
            flags = ["-std=c++14", "-O1", "-ffp-contract=off", "-Wall", "-Wno-unused-function", "-Wno-sign-compare"]
            flags.append("-U_FORTIFY_SOURCE")  # its longjmp refuses to leave a stack
            command = [compiler, *flags, "-Werror", "-shared", "-fPIC", f"-I{HERE}", "-o", f"{path}.so", str(path)]
            messages = {**os.environ, "LC_ALL": "C"}
            done = subprocess.run(command, capture_output=True, text=True, check=False, env=messages)
            if done.returncode:
                raise KernelError(done.stderr)
            self._library = ctypes.CDLL(f"{path}.so")

    @property
    def shared_most(self) -> int:
        """The most threadgroup memory that any run used, bytes."""
        self._library.shared_most.restype = ctypes.c_size_t
        return int(self._library.shared_most())

    def run(
        self,
        template: Template,
        inputs: Mapping[str, Array],
        shape: Sequence[int],
        grid: Sequence[int],
        threads: int,
        order: int = 0,
    ) -> Array:
        """Run over a grid: `run_all` for a kernel of one output."""
        (out,) = self.run_all(template, inputs, [shape], grid, threads, order)
        return out

    def run_all(
        self,
        template: Template,
        inputs: Mapping[str, Array],
        shapes: Sequence[Sequence[int]],
        grid: Sequence[int],
        threads: int,
        order: int = 0,
    ) -> list[Array]:
        """Run over a grid.

        Args:
            template: one of the instances.
            inputs: the arrays by name.
            shapes: of the outputs.
            grid: threads in all, along x, y, z.
            threads: of a threadgroup, along x.
            order: of the threads: 0 forward, 1 reverse, more = seed of a shuffle.

        Returns:
            The outputs, filled with 0xff before; bfloat16 as uint16.

        Raises:
            KernelError: what the kernel did.
        """
        arrays, outs = [], []
        for key, kind in self.inputs.items():
            assert inputs[key].dtype == words(kind, template), key
            arrays.append(np.ascontiguousarray(inputs[key]))
        for kind, shape in zip(self.outputs.values(), shapes, strict=True):
            out = np.zeros(tuple(shape), words(kind, template))
            out.view(np.uint8)[...] = 0xFF
            outs.append(out)
        arrays += outs
        data = (ctypes.c_void_p * len(arrays))(*(array.ctypes.data for array in arrays))
        size = (ctypes.c_size_t * len(arrays))(*(array.size for array in arrays))
        sizes = ctypes.c_uint * 3
        assert 1 <= threads <= 1024
        assert min(grid) > 0
        launch = getattr(self._library, f"launch_{self.instances.index(dict(template))}")
        launch.restype = ctypes.c_char_p
        error = launch(data, size, sizes(*grid), sizes(threads, 1, 1), ctypes.c_uint(order))
        if error is not None:
            raise KernelError(error.decode())
        return outs


def library(kernel: Kernel, instances: Sequence[Template]) -> Library:
    """A kernel of the package."""
    kinds = {"rows": "uint8", "extent": "uint32", "turns": "float32"}
    inputs = {name: kinds[name] for name in kernel.inputs}
    return Library(kernel.source, kernel.header, inputs, instances, kernel.name)
