"""What a backend does, and which one a machine gets."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from pion.attention import choice
from pion.attention.merge import F32, Part
from pion.attention.numpy_ops import NumpyBackend

__all__ = ["AtOnce", "Backend", "make"]

log = logging.getLogger("pion.attention")


class Backend(Protocol):
    """Computes on arrays. `held` is whatever `hold` returned; queries come scaled. See `numpy_ops` for the shapes.

    Attributes:
        name: `cpu`, `mlx` or `metal`.
        device: what it computes on, in a word.
        at_once: it is an `AtOnce`.
    """

    name: str
    device: str
    at_once: bool

    def hold(self, keys: F32, values: F32) -> Any: ...
    def dense(self, held: Any, queries: F32, first: int = 0) -> Part: ...
    def suffix(self, keys: F32, values: F32, queries: F32, visible: NDArray[np.int64]) -> Part: ...
    def over(self, held: Any, queries: F32, runs: Sequence[tuple[int, int]]) -> Part: ...
    def picked(self, held: Any, queries: F32, positions: Sequence[NDArray[np.int64]]) -> Part: ...
    def sums(self, held: Any, queries: F32, first: int = 0) -> F32: ...
    def means(self, held: Any, block: int) -> F32: ...
    def extremes(self, held: Any, block: int) -> tuple[F32, F32]: ...
    def table(self, held: Any, block: int, selector: str) -> tuple[Any, ...]: ...


class AtOnce(Backend, Protocol):
    """One that does more in one pass over its device, and computes with rows as they are stored. See `metal_ops`."""

    def hold_rows(self, heads: int, dim: int, count: int, keys: Any, values: Any) -> Any: ...
    def fused(self, held: Any, queries: F32, keys: F32, values: F32, length: int, first: int = 0) -> Part: ...
    def sparse(
        self, held: Any, queries: F32, head_map: NDArray[np.int64], table: tuple[Any, ...], block: int, k_top: int,
        selector: str, suffix: tuple[F32, F32] | None, first: int,
    ) -> Part: ...  # fmt: skip


def make(mode: str, half: bool) -> Backend:
    """The backend for `auto`, `metal`, `mlx` or `cpu`.

    `auto`: Metal kernels where there is Metal, MLX operations on another GPU, else numpy, which on a CPU takes a fifth
    of the time of MLX's operations.

    Raises:
        ValueError: there is no such backend on this machine; the text says which there are.
    """
    if mode == "cpu" or (mode == "auto" and not choice.may_have_gpu()):
        return NumpyBackend(half)
    why = choice.refusal(mode)
    if why is not None or mode not in choice.MODES[:3]:
        raise ValueError(f"attention {mode}: {why or 'want auto, metal, mlx or cpu'}")
    try:
        return _on_mlx(mode, half)
    except (ImportError, RuntimeError) as error:
        if mode != "auto":
            raise ValueError(f"attention {mode}: {error}") from error
        log.warning("mlx cannot be used (%s): attention is computed by numpy", error)
        return NumpyBackend(half)


def _on_mlx(mode: str, half: bool) -> Backend:
    import mlx.core as mx

    from pion.attention.mlx_ops import MlxBackend

    if mx.metal.is_available() and mode != "mlx":
        from pion.attention.metal_ops import MetalBackend

        return MetalBackend(half)
    if mode == "mlx" or mx.default_device().type == mx.DeviceType.gpu:
        return MlxBackend(half)
    return NumpyBackend(half)
