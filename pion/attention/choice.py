"""Which backend computes. Neither numpy nor mlx is imported here: the server asks at its start."""

from __future__ import annotations

import importlib.util
import platform
import sys
from importlib import metadata
from typing import Final

__all__ = ["MODES", "explain", "has_metal", "may_have_gpu", "refusal"]

#: What may be asked for. `auto`: the best there is.
MODES: Final = ("auto", "metal", "mlx", "cpu", "off")
_CUDA: Final = ("mlx-cuda-13", "mlx-cuda-12", "mlx-cuda")


def has_mlx() -> bool:
    """Whether mlx is installed."""
    return importlib.util.find_spec("mlx") is not None


def has_metal() -> bool:
    """Whether this is a machine with Metal and mlx is installed."""
    return sys.platform == "darwin" and platform.machine() == "arm64" and has_mlx()


def may_have_gpu() -> bool:
    """Whether mlx could compute on a GPU here, so that importing it to find out is worth its while."""
    if has_metal():
        return True
    for name in _CUDA:
        try:
            metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        return True
    return False


def refusal(mode: str) -> str | None:
    """Why this machine cannot compute as asked; None when it can."""
    if mode == "metal" and not has_metal():
        return "there is no Metal here (auto uses it where it is; --metal-attention takes what there is)"
    if mode == "mlx" and not has_mlx():
        return "mlx is not installed (pip install 'pion-server[mlx]')"
    return None


def explain(mode: str, wants_metal: bool, half: bool, window: int) -> str:
    """The configuration in words, for the banner.

    Args:
        mode: of `MODES`.
        wants_metal: --metal-attention was given.
        half: K/V are held in half precision.
        window: how many positions of a prefix are seen; 0 = all.
    """
    if mode == "off":
        return "off"
    words = {
        "auto": "the best of this machine, chosen at the first ATTEND command",
        "metal": "Metal kernels",
        "mlx": "MLX operations",
        "cpu": "numpy",
    }[mode]
    if mode == "auto" and has_metal():
        words = "Metal kernels"
    elif mode == "auto" and not may_have_gpu():
        words = "numpy"
        if wants_metal:
            words += " (the portable backend: there is no Metal here)"
    if half:
        words += ", K/V in half precision"
    if window:
        words += f", the last {window} positions of a prefix"
    return words
