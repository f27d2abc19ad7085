"""Backends of attention that this machine has, and arrays to try them on."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from pion.attention.backends import Backend, make
from tests.support import models

#: Name, half precision. mlx comes with the fast BLAS of `tests.support.models`.
#: "twins" is the Metal backend with the kernels' twins in place of the kernels.
BACKENDS = (("cpu", False), ("cpu", True), ("mlx", False), ("twins", False))


@functools.cache
def backend(name: str, half: bool) -> Backend:
    """A backend; skips where it needs mlx and there is none."""
    if name != "cpu":
        models.need_mlx()
    if name == "twins":
        from pion.attention.metal_ops import MetalBackend

        return MetalBackend(half, "ops")
    return make(name, half)


def normal(seed: int, *shape: int) -> np.ndarray[Any, Any]:
    """Normal fp32 values."""
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def cosine(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> float:
    """Of all values together."""
    a, b = a.astype(np.float64).ravel(), b.astype(np.float64).ravel()
    return float(a @ b / np.sqrt((a @ a) * (b @ b)))
