"""Pion under the name of the published client; everything here lives in `pion`."""

from pion import (
    HybridRetrievalCache,
    PionMlxCompatError,
    PionPrefixCache,
    PionPromptCache,
    __version__,
    install_pion_attention_patch,
    make_pion_prompt_cache,
    mlx_lm_seam_report,
    uninstall_pion_attention_patch,
)

__all__ = [
    "HybridRetrievalCache",
    "PionMlxCompatError",
    "PionPrefixCache",
    "PionPromptCache",
    "__version__",
    "install_pion_attention_patch",
    "make_pion_prompt_cache",
    "mlx_lm_seam_report",
    "uninstall_pion_attention_patch",
]
