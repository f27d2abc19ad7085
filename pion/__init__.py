"""Pion: a shared KV cache for language models.

The names below are loaded when first used, so that the server starts without numpy and a client without a server.

======================  ================================================================================
`Engine`                the store in this process, without a socket (``pion.store``)
`Client`                blocking client: rows as numpy arrays, any Redis command (``pion.client``)
`AsyncClient`           the same for trio
`PionPromptCache`       four lines for mlx-lm
`HybridRetrievalCache`  the K/V of retrieved chunks, in any order
`PionMlxCompatError`    a model, or an mlx-lm, that this version cannot store
`make_pion_prompt_cache`, `PionPrefixCache`, `install_pion_attention_patch`, `uninstall_pion_attention_patch`
                        the server attends to a prefix, in mlx-lm's models (docs/stage2.md)
`mlx_lm_seam_report`    what of mlx-lm that depends on
`hash_block`            the block hash that routers probe with ``KV.PREFIX.MEMBERSHIP``
`make_namespace`        the key of a prefix
======================  ================================================================================
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pion.client.async_ import AsyncClient
    from pion.client.attention_patch import install_pion_attention_patch, uninstall_pion_attention_patch
    from pion.client.caches import PionMlxCompatError
    from pion.client.hybrid import HybridRetrievalCache
    from pion.client.mlx_seam import mlx_lm_seam_report
    from pion.client.namespace import hash_block, make_namespace
    from pion.client.prefix_cache import PionPrefixCache, make_pion_prompt_cache
    from pion.client.prompt_cache import PionPromptCache
    from pion.client.sync import Client
    from pion.store.engine import Engine

__version__ = "0.1.0"
__all__ = [
    "AsyncClient",
    "Client",
    "Engine",
    "HybridRetrievalCache",
    "PionMlxCompatError",
    "PionPrefixCache",
    "PionPromptCache",
    "__version__",
    "hash_block",
    "install_pion_attention_patch",
    "make_namespace",
    "make_pion_prompt_cache",
    "mlx_lm_seam_report",
    "uninstall_pion_attention_patch",
]

_HOMES = {
    "AsyncClient": "pion.client.async_",
    "Client": "pion.client.sync",
    "Engine": "pion.store.engine",
    "HybridRetrievalCache": "pion.client.hybrid",
    "PionMlxCompatError": "pion.client.caches",
    "PionPrefixCache": "pion.client.prefix_cache",
    "PionPromptCache": "pion.client.prompt_cache",
    "hash_block": "pion.client.namespace",
    "install_pion_attention_patch": "pion.client.attention_patch",
    "make_namespace": "pion.client.namespace",
    "make_pion_prompt_cache": "pion.client.prefix_cache",
    "mlx_lm_seam_report": "pion.client.mlx_seam",
    "uninstall_pion_attention_patch": "pion.client.attention_patch",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'pion' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
