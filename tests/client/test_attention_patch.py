"""Where mlx-lm's attention is replaced, and what is refused."""

from __future__ import annotations

import importlib
import inspect
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest

import pion
from pion import (
    PionMlxCompatError,
    PionPrefixCache,
    PionPromptCache,
    install_pion_attention_patch,
    make_pion_prompt_cache,
    mlx_lm_seam_report,
    uninstall_pion_attention_patch,
)
from tests.support import models

models.need_mlx()
mx = models.mx
base: Any = importlib.import_module("mlx_lm.models.base")
NAME = "scaled_dot_product_attention"


@pytest.fixture
def patched() -> Iterator[None]:
    install_pion_attention_patch()
    yield
    uninstall_pion_attention_patch()


def test_every_module_that_bound_it_is_patched_and_put_back() -> None:
    llama: Any = importlib.import_module("mlx_lm.models.llama")
    own: Any = types.ModuleType("a_model_of_ones_own")
    other: Any = types.ModuleType("mlx_lm.models.imaginary")
    sys.modules |= {own.__name__: own, other.__name__: other}
    original = base.scaled_dot_product_attention
    own.scaled_dot_product_attention = original
    own.something_else = original
    other.sdpa = original
    later = next(name for name in ("mlx_lm.models.starcoder2", "mlx_lm.models.phi3") if name not in sys.modules)
    try:
        install_pion_attention_patch()
        patch = base.scaled_dot_product_attention
        assert patch is not original
        assert llama.scaled_dot_product_attention is own.scaled_dot_product_attention is other.sdpa is patch
        assert own.something_else is original, "another name outside of mlx-lm is somebody else's business"
        assert inspect.signature(patch) == inspect.signature(original)
        install_pion_attention_patch()
        assert base.scaled_dot_product_attention is patch
        loaded: Any = importlib.import_module(later)
        assert loaded.scaled_dot_product_attention is patch
    finally:
        uninstall_pion_attention_patch()
    for module in (base, llama, own, loaded):
        assert module.scaled_dot_product_attention is original
    assert other.sdpa is original
    uninstall_pion_attention_patch()
    assert base.scaled_dot_product_attention is original
    for name in (own.__name__, other.__name__):
        del sys.modules[name]


def test_other_caches_are_attended_to_as_ever(patched: None) -> None:
    model = models.tiny_llama()
    got = models.greedy(model, _plain(model), [3, 1, 4], 12)
    uninstall_pion_attention_patch()
    assert got == models.greedy(model, _plain(model), [3, 1, 4], 12)


def _plain(model: Any) -> list[Any]:
    from mlx_lm.models.cache import make_prompt_cache

    return list(make_prompt_cache(model))


# --- the seam ---------------------------------------------------------------------------------------------------------


def test_the_report_says_what_is_there(patched: None) -> None:
    report = mlx_lm_seam_report()
    assert report["signature_ok"]
    assert report["missing_symbols"] == []
    params = report["sdpa_params"]
    assert params is not None
    assert params == report["expected_sdpa_params"][: len(params)]
    assert report["mlx_lm_version"]
    assert {*report} == {
        "mlx_lm_version", "tested_range", "max_tested", "sdpa_params", "expected_sdpa_params", "missing_symbols",
        "signature_ok",
    }  # fmt: skip


def _refused(why: str) -> None:
    original = getattr(base, NAME, None)
    with pytest.raises(PionMlxCompatError, match=why) as refused:
        install_pion_attention_patch()
    assert not isinstance(refused.value, ImportError)
    assert getattr(base, NAME, None) is original, "nothing was changed"


def test_another_signature_is_refused_with_what_was_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, NAME, lambda q, k, v: None)
    _refused(r"parameters \['q', 'k', 'v'\]")
    assert mlx_lm_seam_report()["signature_ok"] is False


def test_a_missing_function_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(base, NAME)
    _refused("has no mlx_lm.models.base.scaled_dot_product_attention")


def test_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    import mlx_lm

    monkeypatch.setattr(mlx_lm, "__version__", "0.20.0")
    _refused("0.20.0 is older than 0.20.1")
    monkeypatch.setattr(mlx_lm, "__version__", "0.33.0.dev1")
    try:
        with pytest.warns(RuntimeWarning, match="newer than"):
            install_pion_attention_patch()
    finally:
        uninstall_pion_attention_patch()


def test_without_mlx_lm(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name == "mlx_lm" or name.startswith("mlx_lm.")]:
        monkeypatch.setitem(sys.modules, name, None)  # an import of it fails
    report = mlx_lm_seam_report()
    assert (report["mlx_lm_version"], len(report["missing_symbols"])) == (None, 2)
    with pytest.raises(PionMlxCompatError, match=r"needs mlx-lm.*pip install"):
        install_pion_attention_patch()


def test_the_published_names() -> None:
    import pion_vllm_mlx

    for name in pion_vllm_mlx.__all__:
        assert getattr(pion_vllm_mlx, name) is getattr(pion, name)


# --- what cannot be answered for --------------------------------------------------------------------------------------


@pytest.fixture
def pc(server: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[PionPromptCache]:
    """A client of a prefix "doc" of 20 tokens that stays on the server."""
    monkeypatch.setenv("PION_PROMPT_CACHE_NO_INPROC", "1")
    with PionPromptCache(models.tiny_llama(), port=server.port, stage2=True) as pc:
        pc.get_or_prefill(list(range(20)), "doc")
        yield pc


def test_more_than_one_sequence_is_refused(pc: PionPromptCache, patched: None) -> None:
    cache = make_pion_prompt_cache(pc.model, "doc", pc, 20)
    with pytest.raises(NotImplementedError, match="PionPrefixCache assumes B=1; got B=2"):
        pc.model(mx.array([[1, 2], [3, 4]]), cache=cache)


def test_without_the_patch_nothing_is_attended_to(pc: PionPromptCache, patched: None) -> None:
    cache = make_pion_prompt_cache(pc.model, "doc", pc, 20)
    uninstall_pion_attention_patch()
    with pytest.raises(RuntimeError, match="install_pion_attention_patch"):
        make_pion_prompt_cache(pc.model, "doc", pc, 20)
    with pytest.raises(RuntimeError, match="install_pion_attention_patch"):
        pc.model(mx.array([[1]]), cache=cache)


def test_a_model_that_attends_elsewhere_is_refused_by_name(
    pc: PionPromptCache, patched: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def own(queries: Any, keys: Any, values: Any, cache: Any, scale: float, mask: Any) -> Any:
        return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask)

    monkeypatch.setattr(models.llama, NAME, own)
    with pytest.raises(PionMlxCompatError, match=r"mlx_lm.models.llama.Model does not attend by .* in slots \[0, 1\]"):
        make_pion_prompt_cache(pc.model, "doc", pc, 20)
    cache = [PionPrefixCache(layer, "doc", pc, 20) for layer in range(2)]
    pc.model(mx.array([[1]]), cache=cache)
    with pytest.raises(PionMlxCompatError, match="nobody asked for the attention"):
        pc.model(mx.array([[1]]), cache=cache)


def test_a_model_that_changes_keys_behind_its_cache_is_refused(
    pc: PionPromptCache, patched: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    through = models.llama.scaled_dot_product_attention
    monkeypatch.setattr(models.llama, NAME, lambda q, k, v, **more: through(q, k * 1, v, **more))
    with pytest.raises(PionMlxCompatError, match="slot 0: this model changes K/V"):
        make_pion_prompt_cache(pc.model, "doc", pc, 20)


def test_a_mask_that_is_none_of_mlx_lms_is_refused(pc: PionPromptCache, patched: None) -> None:
    cache = PionPrefixCache(0, "doc", pc, 20)
    keys = mx.zeros((1, 2, 3, 8))
    k, v = cache.update_and_fetch(keys, keys)
    with pytest.raises(NotImplementedError, match="adds to the logits"):
        base.scaled_dot_product_attention(
            mx.zeros((1, 4, 3, 8)), k, v, cache=cache, scale=1.0, mask=mx.full((3, 23), -0.5)
        )
