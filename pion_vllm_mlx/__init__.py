"""Pion under the name of the published client; everything here lives in `pion`."""

from pion import HybridRetrievalCache, PionMlxCompatError, PionPromptCache, __version__

__all__ = ["HybridRetrievalCache", "PionMlxCompatError", "PionPromptCache", "__version__"]

_LATER = {
    "PionPrefixCache": "the attention patch",
    "install_pion_attention_patch": "the attention patch",
    "make_pion_prompt_cache": "the attention patch",
    "mlx_lm_seam_report": "the attention patch",
    "uninstall_pion_attention_patch": "the attention patch",
}


def __getattr__(name: str) -> object:
    if name in _LATER:
        raise AttributeError(f"{name} ({_LATER[name]}) is not in pion-server {__version__}")
    raise AttributeError(f"module 'pion_vllm_mlx' has no attribute {name!r}")
