"""mlx, where it is installed: its modules, and the memory of its arrays.

mlx and mlx-lm are imported inside functions: importing this module needs neither.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import warnings
from typing import Any, Final

import numpy as np

__all__ = ["PionMlxCompatError", "mlx_modules", "mlx_used", "pack_rows", "words"]

_INSTALL: Final = (
    "this needs mlx and mlx-lm: python -m pip install 'pion-server[mlx]'. Without them use "
    "PionPromptCache(model=None), or KV.PREFIX.* and V.* through redis-py or pion.Client"
)


class PionMlxCompatError(RuntimeError):
    """mlx-lm, or this model's cache, is not of the shape this version of Pion can store and restore.

    Deliberately not an ImportError: code that makes mlx optional would swallow it.
    """


class _Process:
    """What is known of mlx in this process.

    Attributes:
        used: arrays were computed in it.
        forked: it is a child of one that had mlx loaded: ``"used"``, or ``"loaded"`` where nobody knows whether it was
            used; empty otherwise.
    """

    used = False
    forked = ""


_FORKED: Final = (
    "this process was forked from one that had used mlx, and mlx never ends a computation in such a child (its threads "
    "are the parent's): start workers with multiprocessing.get_context('spawn'), or fork before mlx is used"
)
_PATIENCE: Final = 5.0  # seconds for the sum of two numbers


def _after_fork() -> None:
    if "mlx.core" in sys.modules and not _Process.forked:
        _Process.forked = "used" if _Process.used else "loaded"


os.register_at_fork(after_in_child=_after_fork)


def mlx_used() -> None:
    """Say that arrays are about to be computed.

    Raises:
        PionMlxCompatError: they would never be: this is a forked child of a process that had used mlx.
    """
    if _Process.forked == "loaded":
        _Process.forked = "" if _computes() or _has_threads() else "used"
    if _Process.forked:
        raise PionMlxCompatError(_FORKED)
    _Process.used = True


def _computes() -> bool:
    """Whether mlx computes at all here: tried in a child, which can be ended if it hangs, or end by itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python's, of forking beside other threads
        pid = os.fork()
    if pid == 0:
        status = 1
        try:
            import mlx.core as mx

            mx.eval(mx.array([1.0]) + 1)
            status = 0
        finally:
            os._exit(status)
    deadline = time.monotonic() + _PATIENCE
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return status == 0
        time.sleep(0.005)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return False


def _has_threads() -> bool:
    """Whether this process runs threads that are not Python's: mlx's own, where mlx was first used in this process. A
    child of it then hangs as any other."""
    try:
        return len(os.listdir("/proc/self/task")) > threading.active_count()
    except OSError:  # not Linux
        return False


def mlx_modules() -> tuple[Any, Any]:
    """``mlx.core`` and ``mlx_lm.models.cache``.

    Raises:
        ImportError: one is missing; the text names the command that installs them.
        PionMlxCompatError: mlx cannot be used in this process, see `mlx_used`.
    """
    if _Process.forked:
        mlx_used()
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
