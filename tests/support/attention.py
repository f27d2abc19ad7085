"""Backends of attention that this machine has, and arrays to try them on.

"metal" is the Metal backend: on the GPU where there is one, else with its kernels in the emulator.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from pion.attention.backends import Backend, make
from tests.support import models

#: Name, half precision. mlx comes with the fast BLAS of `tests.support.models`.
#: "twins" is the Metal backend with the kernels' twins in place of the kernels.
BACKENDS = (
    ("cpu", False),
    ("cpu", True),
    ("mlx", False),
    ("mlx", True),
    ("twins", False),
    ("twins", True),
    pytest.param(("metal", False), marks=pytest.mark.slow),
    pytest.param(("metal", True), marks=pytest.mark.slow),
)


@functools.cache
def backend(name: str, half: bool) -> Backend:
    """A backend; skips where it needs mlx and there is none."""
    if name != "cpu":
        models.need_mlx()
    if name in ("twins", "metal"):
        return metal(half, twins=name == "twins")
    return make(name, half)


def metal(half: bool = False, *, twins: bool = False, order: int = 0) -> Any:
    """The Metal backend.

    Args:
        half: as everywhere.
        twins: with the kernels' twins instead of the kernels.
        order: of the emulated threads, see `tests.metal.emulated`.
    """
    models.need_mlx()
    from pion.attention.metal_ops import MetalBackend
    from tests.metal.emulated import OnMlx

    return MetalBackend(half, "ops" if twins else "metal" if models.mx.metal.is_available() else OnMlx(order))


def normal(seed: int, *shape: int) -> np.ndarray[Any, Any]:
    """Normal fp32 values."""
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def cosine(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> float:
    """Of all values together."""
    a, b = a.astype(np.float64).ravel(), b.astype(np.float64).ravel()
    return float(a @ b / np.sqrt((a @ a) * (b @ b)))
