"""One small model of each family of caches, with random weights and mlx-lm's real classes.

Each is made in a fraction of a second and equal in every process: weights are drawn from a seed by name.
"""

from __future__ import annotations

import importlib
import math
from typing import Any

import numpy as np
import pytest

from tests.support import models

VOCABULARY = 96
if models.mx is not None:
    models.mx.disable_compile()  # on a CPU it starts a C compiler for every new shape

_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": (
        "llama",
        {
            "hidden_size": 32,
            "num_hidden_layers": 3,
            "intermediate_size": 48,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "rms_norm_eps": 1e-5,
        },
    ),
    "qwen2": (  # makes no cache of its own, so that mlx-lm's max_kv_size counts
        "qwen2",
        {
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "intermediate_size": 48,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "rms_norm_eps": 1e-5,
        },
    ),
    "qwen3_next": (  # three recurrent layers, one of attention
        "qwen3_next",
        {
            "hidden_size": 32,
            "num_hidden_layers": 4,
            "intermediate_size": 48,
            "num_attention_heads": 4,
            "linear_num_value_heads": 2,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 32,
            "linear_conv_kernel_dim": 4,
            "num_experts": 0,
            "num_experts_per_tok": 0,
            "decoder_sparse_step": 1,
            "shared_expert_intermediate_size": 16,
            "mlp_only_layers": [],
            "moe_intermediate_size": 16,
            "rms_norm_eps": 1e-5,
            "num_key_value_heads": 2,
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.5,
            "max_position_embeddings": 4096,
            "head_dim": 16,
        },
    ),
    "mamba2": (  # recurrent layers only
        "mamba2",
        {
            "num_heads": 4,
            "head_dim": 16,
            "hidden_size": 32,
            "intermediate_size": 64,
            "state_size": 16,
            "num_hidden_layers": 2,
            "layer_norm_epsilon": 1e-5,
            "conv_kernel": 4,
            "n_groups": 1,
            "use_bias": False,
            "use_conv_bias": True,
            "tie_word_embeddings": True,
            "time_step_limit": (0.0, 10.0),
            "time_step_rank": "auto",
        },
    ),
    "mamba": (
        "mamba",
        {
            "hidden_size": 32,
            "intermediate_size": 64,
            "state_size": 8,
            "num_hidden_layers": 2,
            "conv_kernel": 4,
            "use_bias": False,
            "use_conv_bias": True,
            "time_step_rank": 4,
        },
    ),
    "jamba": (
        "jamba",
        {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "attn_layer_offset": 1,
            "attn_layer_period": 2,
            "expert_layer_offset": 9,
            "expert_layer_period": 99,
            "mamba_d_conv": 4,
            "mamba_d_state": 8,
            "mamba_expand": 2,
            "num_experts": 1,
            "num_experts_per_tok": 1,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 4096,
        },
    ),
    "recurrent_gemma": (  # recurrent layers and windows
        "recurrent_gemma",
        {
            "attention_bias": False,
            "conv1d_width": 4,
            "hidden_size": 32,
            "intermediate_size": 96,
            "logits_soft_cap": 30.0,
            "num_attention_heads": 4,
            "num_hidden_layers": 3,
            "num_key_value_heads": 1,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e4,
            "attention_window_size": 40,
            "block_types": ["recurrent", "attention"],
        },
    ),
    "llama4": (  # three chunked layers, one of attention
        "llama4",
        {
            "text_config": {
                "attention_bias": False,
                "attention_chunk_size": 48,
                "head_dim": 16,
                "hidden_size": 32,
                "interleave_moe_layer_step": 2,
                "intermediate_size": 32,
                "intermediate_size_mlp": 48,
                "max_position_embeddings": 4096,
                "model_type": "llama4_text",
                "num_attention_heads": 4,
                "num_experts_per_tok": 1,
                "num_hidden_layers": 4,
                "num_key_value_heads": 2,
                "num_local_experts": 2,
                "rms_norm_eps": 1e-5,
                "rope_scaling": None,
                "rope_theta": 1e4,
                "use_qk_norm": False,
                "vocab_size": VOCABULARY,
            }
        },
    ),
    "deepseek_v32": (  # two caches a layer, of attention
        "deepseek_v32",
        {
            "hidden_size": 32,
            "index_head_dim": 32,
            "index_n_heads": 2,
            "index_topk": 24,
            "intermediate_size": 48,
            "moe_intermediate_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "n_shared_experts": None,
            "n_routed_experts": None,
            "kv_lora_rank": 16,
            "q_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 16,
            "qk_nope_head_dim": 16,
            "rope_scaling": None,
        },
    ),
    "falcon_h1": (  # a recurrent cache and one of attention in each layer
        "falcon_h1",
        {
            "head_dim": 16,
            "hidden_size": 32,
            "intermediate_size": 48,
            "mamba_d_head": 16,
            "mamba_d_ssm": 64,
            "mamba_d_state": 16,
            "mamba_n_heads": 4,
            "num_attention_heads": 4,
            "num_hidden_layers": 2,
            "num_key_value_heads": 2,
            "lm_head_multiplier": 1.0,
        },
    ),
    "gpt_oss": (  # windows and attention with sinks
        "gpt_oss",
        {
            "num_hidden_layers": 4,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "hidden_size": 32,
            "intermediate_size": 32,
            "head_dim": 16,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "sliding_window": 32,
            "rope_theta": 10000,
            "rope_scaling": None,
        },
    ),
    "gemma3": (  # two windows, one of attention
        "gemma3_text",
        {
            "hidden_size": 32,
            "num_hidden_layers": 3,
            "intermediate_size": 48,
            "num_attention_heads": 4,
            "head_dim": 16,
            "num_key_value_heads": 2,
            "query_pre_attn_scalar": 16,
            "sliding_window": 40,
            "sliding_window_pattern": 3,
        },
    ),
}
FAMILIES = tuple(_CONFIGS)
#: Families whose every cache holds all its tokens, so that a stored one can be cut anywhere.
CUTTABLE = ("llama", "qwen2", "deepseek_v32")


def tiny(family: str, dtype: str = "float32", seed: int = 0) -> Any:
    """A model; skips where the installed mlx-lm does not have the family."""
    models.need_mlx()
    name, options = _CONFIGS[family]
    try:
        module = importlib.import_module(f"mlx_lm.models.{name}")
    except ImportError as error:
        pytest.skip(f"this mlx-lm has no {name}: {error}")
    if family == "llama4" and _trims_by_room():
        options = {"text_config": {**options["text_config"], "attention_chunk_size": 256}}
    known = getattr(module.ModelArgs, "__dataclass_fields__", {})
    options = {"model_type": name, "vocab_size": VOCABULARY, **options}
    model = module.Model(module.ModelArgs(**{key: value for key, value in options.items() if key in known}))
    mx = models.mx
    flat = []
    for at, (key, array) in enumerate(sorted(models.tree_flatten(model.parameters()))):
        random = np.random.default_rng([seed, at])
        values = random.standard_normal(array.shape).astype(np.float32) * 0.3
        if key.endswith(("A_log", "dt_bias", "a_param")):
            values = np.log(1 + np.abs(values)) + 0.1
        elif values.ndim > 1:
            values *= min(1.0, 4 / math.sqrt(values.shape[-1]))
        flat.append((key, mx.array(values).astype(getattr(mx, dtype))))
    model.update(models.tree_unflatten(flat))
    model.eval()
    mx.eval(model.parameters())
    return model


def _trims_by_room() -> bool:
    """Whether a ChunkedKVCache drops its front by the room it has and not by its tokens, as mlx-lm up to 0.31 does:
    chunks below 256 then lose tokens that they still need, without us."""
    from mlx_lm.models.cache import ChunkedKVCache

    cache = ChunkedKVCache(48)
    cache.update_and_fetch(models.mx.zeros((1, 1, 3, 8)), models.mx.zeros((1, 1, 3, 8)))
    cache.maybe_trim_front()
    return bool(cache.start_position)


def tokens(count: int, seed: int = 1) -> list[int]:
    """Ids that every process draws alike."""
    return [int(token) for token in np.random.default_rng(seed).integers(0, VOCABULARY, count)]


def logits(model: Any, cache: list[Any], suffix: list[int]) -> np.ndarray[Any, Any]:
    """The logits behind `suffix`, (vocabulary,) float32; the cache grows by it."""
    mx = models.mx
    out = model(mx.array([suffix]), cache=cache)[0, -1].astype(mx.float32)
    return np.array(out)
