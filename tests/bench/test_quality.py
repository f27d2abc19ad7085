"""The figures of the quality harness on cases small enough to know them, and the whole of it on a tiny model."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench import quality, quality_codecs, quality_metrics, quality_models, quality_prompts, quality_report
from bench.quality_codecs import Layer, Split
from pion._core import quant, quantkeys
from tests.support import models

rng = np.random.default_rng(5)


def test_kl_of_known_distributions() -> None:
    p, q = np.array([[0.5, 0.25, 0.25]]), np.array([[0.25, 0.25, 0.5]])
    want = 0.5 * math.log(2) - 0.25 * math.log(2)
    logits = [np.log(each).astype(np.float32) for each in (p, q)]
    assert quality_metrics.divergence(logits[0], logits[1])[0] == pytest.approx(want, rel=1e-6)
    assert quality_metrics.divergence(logits[0], logits[1] + 7)[0] == pytest.approx(
        want, rel=1e-5
    )  # a shift is nothing


def test_kl_of_equal_logits_is_zero_and_small_ones_are_exact() -> None:
    logits = rng.standard_normal((3, 1000)).astype(np.float32) * 5
    assert list(quality_metrics.divergence(logits, logits)) == [0, 0, 0]
    change = rng.standard_normal(1000).astype(np.float32) * np.float32(1e-3)
    other = logits + change
    weights = np.exp(logits[0].astype(np.float64))
    weights /= weights.sum()
    moved = other[0].astype(np.float64) - logits[0]
    variance = weights @ (moved - weights @ moved) ** 2
    assert quality_metrics.divergence(logits, other)[0] == pytest.approx(variance / 2, rel=1e-2)  # to second order


def test_choices_leave_out_control_tokens() -> None:
    logits = np.array([[1, 5, 3], [9, 0, 2]], np.float32)
    assert quality_metrics.choices(logits) == [1, 0]
    assert quality_metrics.choices(logits, [1]) == [2, 0]
    assert logits[0, 1] == 5


def test_bleu() -> None:
    text = list(range(20))
    assert quality_metrics.bleu([(text, text)]) == 1
    assert quality_metrics.bleu([(text, [50 + i for i in text])]) == 0
    # One wrong token in the middle of 9 spoils 1 unigram, 2 bigrams, 3 trigrams and 4 4-grams.
    reference = list(range(9))
    got = [*reference[:4], 99, *reference[5:]]
    want = (8 / 9 * 6 / 8 * 4 / 7 * 2 / 6) ** 0.25
    assert quality_metrics.bleu([(reference, got)]) == pytest.approx(want)
    assert quality_metrics.bleu([(reference, reference[:6])]) == pytest.approx(math.exp(1 - 9 / 6))
    assert quality_metrics.bleu([([1, 2, 1, 2, 3], [1, 2, 1, 2, 1])]) == pytest.approx(
        (4 / 5 * 3 / 4 * 2 / 3 * 1 / 2) ** 0.25
    )


def test_logit_correlation() -> None:
    keys = rng.standard_normal((2, 50, 8)).astype(np.float32)
    queries = rng.standard_normal((4, 3, 8)).astype(np.float32)
    assert quality_metrics.correlation(queries, keys, keys) == pytest.approx(1)
    assert quality_metrics.correlation(queries, keys, keys * 3 + 100) == pytest.approx(1, abs=1e-5)
    assert quality_metrics.correlation(queries, keys, -keys) == pytest.approx(-1)
    halves = keys.copy()
    halves[1] *= -1  # the second key head serves the last two query heads
    assert quality_metrics.correlation(queries, keys, halves) == pytest.approx(0, abs=1e-6)


def test_relative_error() -> None:
    true = np.array([[3, 4]], np.float32)
    assert quality_metrics.relative_error(true, true) == 0
    assert quality_metrics.relative_error(true, np.array([[3, 5]], np.float32)) == pytest.approx(0.2)


def test_splits_are_read_and_written_back() -> None:
    assert [str(Split.parse(name)) for name in quality.SPLITS] == quality.SPLITS
    assert Split.parse("fp16/int8@1").formats(4) == (["fp16"] * 4, ["fp16", "int8", "int8", "fp16"])
    assert Split.parse("turbo4-rows/int8").k == "turbo4-rows"
    for wrong in ("int8", "int8/none", "none/int8", "int8/int8@x", "int8/turbo4-rows"):
        with pytest.raises(ValueError, match="is not K/V"):
            Split.parse(wrong)


@pytest.mark.parametrize("fmt", quality_codecs.CODES)
def test_bytes_are_those_of_the_format(fmt: str) -> None:
    rows = rng.standard_normal((7, 192)).astype(np.float32)
    decoded, size = quality_codecs.through(Layer(rows, 64, 0, 1e4), fmt, keys=False)
    code = quality_codecs.CODES[fmt]
    if fmt in quality_codecs.TURBO:
        code = quant.pack_format(code, 64)
    assert size == 7 * quant.row_bytes(code, 192)
    assert decoded.shape == rows.shape
    assert quality_metrics.relative_error(rows, decoded) < 0.5
    assert (fmt == "fp32") == np.array_equal(rows, decoded)


@pytest.mark.parametrize("first", [0, 40, 64])
def test_key_groups_leave_loose_rows_in_fp16(first: int) -> None:
    rows = rng.standard_normal((200, 128)).astype(np.float32)
    decoded, size = quality_codecs.through(Layer(rows, 64, first, 1e4), "turbo4", keys=True)
    positions = np.arange(first, first + 200)
    groups = [g for g in range(8) if (64 * g >= first) and 64 * g + 64 <= first + 200]
    loose = ~np.isin(positions // 64, groups)
    np.testing.assert_array_equal(decoded[loose], rows[loose].astype(np.float16))
    assert not np.array_equal(decoded[~loose], rows[~loose].astype(np.float16))
    per_group = quantkeys.block_bytes(quant.pack_format(quantkeys.KTURBO4, 64), 128)
    assert size == len(groups) * per_group + 2 * 128 * int(loose.sum())


def test_prompts_are_many_long_varied_and_stay_the_same() -> None:
    texts = quality_prompts.texts()
    assert len(texts) == len(set(texts.values())) == 20
    assert min(map(len, texts.values())) >= 3000
    assert texts == quality_prompts.texts()


class Tiny(quality_models.Subject):
    """A Llama of two layers whose tokens are given, in the place of a real model."""

    def __init__(self) -> None:
        models.need_mlx()
        import mlx.core as mx

        self.mx, self.name, self.title, self.shape = mx, "tiny", "Tiny", "2 layers"
        self.model = models.tiny_llama()
        self.thetas, self.never = [1e4, 1e4], [0, 1]

    def cut(self, text: str, number: int, length: int) -> tuple[list[int], list[int]]:
        ids = [2 + byte % 94 for byte in text.encode()[: length + 1]]
        return ids[:-1], ids[-1:]


def test_the_whole_harness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PION_CACHE", str(tmp_path))
    subject = Tiny()
    monkeypatch.setattr(quality_models, "Subject", lambda name: subject)
    options = argparse.Namespace(prompts=2, tokens=6, bleu_prompts=1)
    splits = [Split.parse(name) for name in ("fp32/fp32", "fp16/fp16", "int8/int8", "fp32/int8", "int8/fp16@1")]
    found = quality.measure("tiny", splits, options)
    same, half, small, values, outer = found["splits"].values()

    assert (same["kl"], same["agreement"], same["bleu"], same["k_error"], same["k_correlation"]) == (
        0,
        1,
        1,
        0,
        pytest.approx(1),
    )
    assert 0 < half["kl"] < small["kl"]
    assert 0 < half["k_error"] < small["k_error"] == outer["k_error"] < 0.01
    assert (values["k_error"], values["v_error"]) == (0, small["v_error"])
    assert small["k_correlation_worst_layer"] <= small["k_correlation"] < 1
    width = 2 * 8
    assert same["bytes_per_token"] == 2 * 2 * quant.row_bytes(quant.FP32, width)
    assert small["bytes_per_token"] == 2 * 2 * quant.row_bytes(quant.INT8, width)
    assert small["bits_per_value"] == pytest.approx(8 * quant.row_bytes(quant.INT8, width) / width)
    assert outer["v_error"] == half["v_error"]

    calls: list[Any] = []
    monkeypatch.setattr(subject, "logits", lambda *args: calls.append(args))
    assert quality.measure("tiny", splits, options) == found  # from what was kept, without the model
    assert calls == []
    capsys.readouterr()

    quality_report.write({"tiny": found}, tmp_path / "docs")
    assert set(json.loads((tmp_path / "docs/quality.json").read_text())["tiny"]["splits"]) == set(map(str, splits))
    page, plot = ((tmp_path / "docs" / name).read_text() for name in ("quality.md", "quality.svg"))
    assert all(f"| {split} |" in page and f">{split}<" in plot for split in splits)


def test_the_page_is_what_its_figures_give() -> None:
    found = json.loads((quality_report.DOCS / "quality.json").read_text())
    assert set(found) == set(quality_models.MODELS)
    for model in found.values():
        assert list(model["splits"]) == quality.SPLITS
    assert (quality_report.DOCS / "quality.md").read_text() == quality_report.markdown(found)
    assert (quality_report.DOCS / "quality.svg").read_text() == quality_report.svg(found)


def test_a_free_run_is_the_models_own(tmp_path: Path) -> None:
    """Started behind the first disagreement, several at once: the same tokens as each alone from the beginning."""
    subject = Tiny()
    ids, suffix = subject.cut(quality_prompts.texts()["prose: story"], 0, 90)
    prefix = subject.prefill(ids, suffix)
    subject.answer([prefix], 12)
    trial = quality.Trial(subject, prefix, {})
    lines = trial.measure([Split("fp32", "fp32"), Split("int8", "int8")], free=True)
    assert lines[0]["free"] == prefix.answer
    others = [subject.prefill([2 + 5 * i % 90 for i in ids], [9]), prefix]
    subject.answer(others, 12)  # together, at equal length
    assert lines[0]["free"] == prefix.answer != others[0].answer

    k, v = trial.side("k", "fp32"), trial.side("v", "fp32")
    spoiled = [[rows * factor for rows in v.rows] for factor in (-3, 40)]
    sides = [quality.Side(rows, v.sizes, quality_codecs.digest(rows), v.errors) for rows in spoiled]
    runs = [(trial.forced(k, side), k, side) for side in sides]
    trial.free(runs)
    for run, _, side in runs:
        alone = subject.greedy(subject.restore(prefix, [(k.rows, side.rows)]), [suffix], 12)[0]
        assert run["free"] == alone != prefix.answer


def test_sliding_windows_are_kept_and_restored() -> None:
    """Continuing on restored rows is continuing on the model's own cache, also where only the last rows are left."""
    subject = Tiny()
    import mlx.core as mx
    from mlx_lm.models import gemma3_text

    args = {"hidden_size": 32, "num_hidden_layers": 3, "intermediate_size": 48, "num_attention_heads": 4}
    args |= {"head_dim": 8, "num_key_value_heads": 1, "vocab_size": 96, "query_pre_attn_scalar": 8}
    args |= {"sliding_window": 16, "sliding_window_pattern": 3}
    subject.model = model = gemma3_text.Model(gemma3_text.ModelArgs(model_type="gemma3_text", **args))
    subject.thetas = [1e4, 1e4, 1e6]
    ids, text = list(range(2, 42)), [50, 51, 52, 53]
    prefix = subject.prefill(ids, text[:1])
    assert [(x.first, len(x.rows)) for x in prefix.k] == [(24, 16), (24, 16), (0, 40)]

    own = model.make_cache()
    model(mx.array([ids]), cache=own)
    want = np.array(model(mx.array([text]), cache=own))[0]
    prefix.answer = [*text[1:], 0]
    got = subject.logits(subject.restore(prefix, [([x.rows for x in prefix.k], [x.rows for x in prefix.v])]), prefix)
    np.testing.assert_allclose(got, want, atol=1e-5)


def test_a_kept_prefix_is_read_back_whole(tmp_path: Path) -> None:
    subject = Tiny()
    prefix = subject.prefill(list(range(2, 60)), [7])
    subject.answer([prefix], 3)
    quality_models.save(tmp_path / "p.npz", prefix)
    again = quality_models.read(tmp_path / "p.npz")
    assert (again.ids, again.suffix, again.answer) == (prefix.ids, prefix.suffix, prefix.answer)
    for a, b in zip(prefix.k + prefix.v, again.k + again.v, strict=True):
        np.testing.assert_array_equal(a.rows, b.rows)
        assert (a.head, a.first, a.theta) == (b.head, b.first, b.theta)
