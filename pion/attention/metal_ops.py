"""The backend for Apple's GPUs: the kernels of `pion.metal_kernels` where there is one, MLX operations for the rest."""

from __future__ import annotations

from pion.attention.mlx_ops import MlxBackend

__all__ = ["MetalBackend"]


class MetalBackend(MlxBackend):
    """See the module text."""

    name = "metal"
