"""mlx, where it is installed: its modules, and the memory of its arrays.

mlx and mlx-lm are imported inside functions: importing this module needs neither.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

__all__ = ["PionMlxCompatError", "mlx_modules", "pack_rows", "words"]

_INSTALL: Final = (
    "this needs mlx and mlx-lm: python -m pip install 'pion-server[mlx]'. Without them use "
    "PionPromptCache(model=None), or KV.PREFIX.* and V.* through redis-py or pion.Client"
)


class PionMlxCompatError(RuntimeError):
    """mlx-lm, or this model's cache, is not of the shape this version of Pion can store and restore.

    Deliberately not an ImportError: code that makes mlx optional would swallow it.
    """


def mlx_modules() -> tuple[Any, Any]:
    """``mlx.core`` and ``mlx_lm.models.cache``.

    Raises:
        ImportError: one is missing; the text names the command that installs them.
    """
    try:
        import mlx.core as mx
        import mlx_lm.models.cache as cache_module
    except ImportError as error:
        raise ImportError(f"{error}; {_INSTALL}") from error
    return mx, cache_module


def words(array: Any) -> np.ndarray[Any, Any]:
    """The memory of an mlx array, shared; bfloat16, which numpy does not know, as u16."""
    import mlx.core as mx

    return np.asarray(memoryview(array.view(mx.uint16) if array.dtype in (mx.bfloat16, mx.float16) else array))


def pack_rows(array: Any, count: int) -> np.ndarray[Any, Any]:
    """The first tokens of a K or V array as rows.

    Args:
        array: mlx array (1, H, capacity, D).
        count: tokens, at most the capacity.

    Returns:
        A copy, numpy (count, H * D), in the array's own words: u16 for the 16-bit floats, f32 otherwise.
    """
    return words(array)[0, :, :count].swapaxes(0, 1).reshape(count, -1)
