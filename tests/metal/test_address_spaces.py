"""The kernels as clang reads them, with Metal's address spaces: g++, which runs them, knows none.

MLX gives a kernel the attributes whose names stand in its body, inputs of fewer than eight elements in constant memory
and all else in device memory. A header that takes a pointer must take it from there, and a pointer to threadgroup
memory must say so. Nothing is run, and it is C++14 with Metal's names, not Metal.
"""

from __future__ import annotations

import functools
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from pion.metal_kernels import KERNELS, Rows
from pion.metal_kernels.bodies import BODIES
from tests.metal import attention_cases as tried
from tests.metal import cases
from tests.metal.emulator import _arguments as arguments
from tests.metal.test_attention_faults import every_template
from tests.support.peers import missing

PRELUDE = """
typedef unsigned uint; typedef unsigned short ushort; typedef unsigned char uchar, uint8_t;
typedef unsigned uint32_t; typedef int int32_t; typedef _Float16 half; typedef __bf16 bfloat16_t;
struct uint3 { uint x, y, z; };
enum class mem_flags { mem_none, mem_device, mem_threadgroup };
constexpr mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(int(a) | int(b)); }
void threadgroup_barrier(mem_flags); void simdgroup_barrier(mem_flags);
float simd_sum(float); float simd_max(float); float exp(float); float log(float); float fabs(float);
template <class To, class From> To as_type(From from) { return __builtin_bit_cast(To, from); }
#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#define device __attribute__((address_space(1)))
#define constant const __attribute__((address_space(2)))
#define threadgroup __attribute__((address_space(3)))
#define thread
"""
ATTRIBUTES = {
    "thread_position_in_grid": "uint3",
    "thread_position_in_threadgroup": "uint3",
    "threadgroup_position_in_grid": "uint3",
    "threads_per_threadgroup": "uint3",
    "thread_index_in_simdgroup": "uint",
    "simdgroup_index_in_threadgroup": "uint",
}
TYPES = {"float32": "float", "uint8": "uint8_t", "uint32": "uint32_t", "int32": "int32_t"}
ARRAY = re.compile(r"\bthreadgroup (\w+ \w+\[)")
FLAGS = ["-std=c++14", "-nostdinc", "-Wall", "-Wextra", "-Wdouble-promotion", "-Werror"]
FLAGS += ["-Wno-unused-parameter", "-Wno-unused-function", "-Wno-sign-compare", "-Wno-unused-const-variable"]
FLAGS += ["-Wno-unused-command-line-argument"]  # of zig's own

# Inputs of decoding kernels that have fewer than eight elements; those of attention have eight at least.
SMALL = {"extent"}


def text_of(
    source: str,
    header: str,
    inputs: Mapping[str, str],
    outputs: Mapping[str, str],
    instances: Sequence[Mapping[str, Any]],
    number: int,
    small: set[str],
) -> str:
    """One kernel in a namespace of its own, instantiated."""
    declared = ", ".join(
        f"{'typename' if key == 'T' else 'bool' if isinstance(value, bool) else 'int'} {key}"
        for key, value in instances[0].items()
    )

    def parameters(own: str) -> str:
        buffers = [
            f"{'constant' if name in small else 'const device'} {TYPES.get(kind, own)} *{name}"
            for name, kind in inputs.items()
        ]
        buffers += [f"device {TYPES.get(kind, own)} *{name}" for name, kind in outputs.items()]
        return ", ".join(buffers + [f"{kind} {name}" for name, kind in ATTRIBUTES.items() if name in source])

    lines = [f"namespace kernel_{number} {{", f'#line 1 "header_{number}"', header, f'#line 1 "body_{number}"']
    lines += [
        f"template <{declared}> void body({parameters('T')}) {{",
        ARRAY.sub(r"static threadgroup \1", source),
        "}",
    ]
    for template in instances:
        own = {"float32": "float", "float16": "half", "bfloat16": "bfloat16_t"}[str(template["T"])]
        lines.append(f"template void body<{arguments(template)}>({parameters(own)});")
    return "\n".join([*lines, "}", ""])


def _every_kernel() -> Iterator[tuple[str, str]]:
    for number, (body, templates) in enumerate(every_template().seen.values()):
        instances = list(templates.values())[:: max(1, len(templates) // 4)]
        yield body.name, text_of(body.source, body.header, body.inputs, body.outputs, instances, number, set())
    kinds = {"rows": "uint8", "extent": "uint32", "turns": "float32"}
    codes = {"rows_int8": 0, "rows_fp8": 5, "rows_mlx4g32": 7, "rows_turbo": 3, "keys_turbo": 17}
    for number, (name, kernel) in enumerate(KERNELS.items()):
        rows = Rows(codes[name] | (96 << 8 if "turbo" in name else 0), 2, 96, 5, 7, 0, name == "keys_turbo")
        instances = [{"T": dtype, **kernel.template(rows)} for dtype in cases.DTYPES]
        inputs = {key: kinds[key] for key in kernel.inputs}
        yield name, text_of(kernel.source, kernel.header, inputs, {"out": "T"}, instances, 100 + number, SMALL)


@functools.cache
def every_kernel() -> dict[str, str]:
    """Text by name."""
    return dict(_every_kernel())


def refused(folder: Path, text: str) -> str:
    """What clang says against it."""
    path = folder / "kernels.cpp"
    path.write_text(PRELUDE + text, encoding="utf-8")
    command = [sys.executable, "-m", "ziglang", "cc", "-x", "c++", "-target", "aarch64-linux-gnu", *FLAGS]
    command += ["-c", str(path), "-o", str(path.with_suffix(".o"))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stderr if done.returncode else ""


def need_clang() -> None:
    if find_spec("ziglang") is None:
        missing("ziglang")


def test_every_kernel_is_right_about_address_spaces(tmp_path: Path) -> None:
    need_clang()
    texts = every_kernel()
    assert set(texts) == {*BODIES, *KERNELS}
    assert refused(tmp_path, "".join(texts.values())) == ""


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        ("attend", "hand_in(threadgroup float *sums", "hand_in(float *sums", "no matching function"),
        ("attend", "hand_in(threadgroup float *sums", "hand_in(device float *sums", "no matching function"),
        ("rotate", "uint t = thread_position_in_threadgroup.x,", "uint t = lane,", "undeclared identifier 'lane'"),
        ("merge", "log(total)", "log(total * 1.0)", "double"),
        ("keys_turbo", "key_planes(P bytes", "key_planes(constant uint8_t *bytes", "no matching function"),
    ],
)
def test_what_is_wrong_about_them_is_found(tmp_path: Path, name: str, old: str, new: str, message: str) -> None:
    need_clang()
    text = every_kernel()[name]
    assert old in text
    said = refused(tmp_path, text.replace(old, new))
    assert message in said


def test_attention_kernels_have_no_small_input() -> None:
    """Else MLX would make two kernels of one name, and each call would compile the other's away."""
    from pion.metal_kernels.device import _LEAST, _large

    mx = tried.mx
    if mx is None:
        missing("mlx")
    assert _LEAST == 8
    assert _large(mx.zeros((2, 3))).shape == (8,)
    assert _large(mx.zeros((2, 4))).shape == (2, 4)
    assert _large(mx.zeros((0,), mx.uint32)).shape == (8,)
