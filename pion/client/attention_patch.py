"""mlx-lm's attention, replaced: for a `PionPrefixCache` the server, or what this process holds, is asked.

mlx-lm's models call ``scaled_dot_product_attention`` of ``mlx_lm.models.base`` by a name of their own module, bound
when that was imported. The patch puts another function in its place wherever the original stands; for every other cache
that calls the original.
"""

from __future__ import annotations

import functools
import sys
import threading
from typing import Any, Final

from pion.client.mlx_seam import ORIGINAL, check_seam
from pion.client.prefix_cache import PionPrefixCache, owner_of

__all__ = ["install_pion_attention_patch", "is_installed", "uninstall_pion_attention_patch"]

_NAME: Final = "scaled_dot_product_attention"
_BASE: Final = "mlx_lm.models.base"
_lock = threading.Lock()


def install_pion_attention_patch() -> None:
    """Have mlx-lm's models ask for the attention over a prefix where their cache is a `PionPrefixCache`.

    Modules of models that are imported later get it too. Doing it twice does nothing.

    Raises:
        PionMlxCompatError: mlx-lm is missing or not as the patch needs it; nothing was changed.
    """
    with _lock:
        check_seam()
        original = getattr(sys.modules[_BASE], _NAME)
        if not hasattr(original, ORIGINAL):
            _replace(original, _patched(original))


def uninstall_pion_attention_patch() -> None:
    """Put mlx-lm's own function back everywhere. Doing it twice does nothing."""
    with _lock:
        base = sys.modules.get(_BASE)
        patched = getattr(base, _NAME, None)
        original = getattr(patched, ORIGINAL, None)
        if original is not None:
            _replace(patched, original)


def is_installed() -> bool:
    """Whether mlx-lm's models are patched."""
    return hasattr(getattr(sys.modules.get(_BASE), _NAME, None), ORIGINAL)


def _replace(old: Any, new: Any) -> None:
    """Wherever a module has bound the one function, bind the other: in all of mlx-lm by any name, elsewhere (models of
    one's own) by its usual one."""
    for name, module in list(sys.modules.items()):
        names = getattr(module, "__dict__", None)
        if not isinstance(names, dict):
            continue
        if name == "mlx_lm" or name.startswith("mlx_lm."):
            bound = [key for key, value in list(names.items()) if value is old]
        else:
            bound = [_NAME] if names.get(_NAME) is old else []
        for key in bound:
            names[key] = new


def _patched(original: Any) -> Any:
    @functools.wraps(original)
    def attention(
        queries: Any, keys: Any, values: Any, cache: Any, scale: float, mask: Any = None, sinks: Any = None
    ) -> Any:
        owner = cache if isinstance(cache, PionPrefixCache) else owner_of(keys)
        more = {} if sinks is None else {"sinks": sinks}
        if owner is None:
            return original(queries, keys, values, cache=cache, scale=scale, mask=mask, **more)
        return owner.attend(original, queries, keys, values, scale, mask, **more)

    setattr(attention, ORIGINAL, original)
    return attention
