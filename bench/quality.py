"""How well row formats keep a model's answers: `python -m bench.quality [--model NAME] [--formats K/V,...] [--write]`.

Each of 20 prompts of 500 and more tokens is computed once. For each pair of formats its K and V are encoded and
decoded by the compiled core and put back in the place of the cache, and the model continues from there:

* teacher-forced over the 64 tokens that the unquantized run chose itself: next-token agreement and KL divergence;
* free and greedy: BLEU-4 over token ids against the unquantized run.

What was measured is kept under $PION_CACHE/quality by the decoded rows it was measured on, so that a second run only
computes what a change of a format changed. docs/quality.* is written by `--write`.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import quality_codecs as codecs
from bench import quality_metrics as metrics
from bench import quality_models as models
from bench import quality_prompts as prompts
from bench.quality_codecs import F32, Split
from pion.demo.blas import cache_dir

SPLITS = [
    *("fp16/fp16", "bf16/bf16", "int8/int8", "fp8/fp8"),
    *("int8/turbo4", "fp8/turbo4", "fp16/turbo4", "int8/mlx4g32", "turbo4/turbo4", "turbo4/mlx4g32", "mlx4g32/mlx4g32"),
    *("int8/turbo3", "fp16/turbo3", "fp16/turbo3@2", "turbo3/turbo3"),
    *("int8/turbo2", "fp16/turbo2", "fp16/turbo2@2", "turbo2/turbo2"),
]
LENGTHS = (520, 555, 590, 625)  # tokens of the prefixes: groups of 64 rows end unfinished
MOST_AT_ONCE = 16  # greedy runs that share one forward pass


@dataclass
class Side:
    """K or V of one prompt in one format, by layer."""

    rows: list[F32]
    sizes: list[int]
    digests: list[str]
    errors: list[float]


class Trial:
    """One prompt with everything that was measured on it.

    Args:
        subject: the model.
        prefix: the unquantized side.
        memo: what is known from earlier runs, by digests of decoded rows; filled.
    """

    def __init__(self, subject: models.Subject, prefix: models.Prefix, memo: dict[str, Any]) -> None:
        self.subject, self.prefix, self.memo = subject, prefix, memo
        self.made: dict[tuple[str, str], Side] = {}

    @functools.cached_property
    def reference(self) -> tuple[F32, list[F32]]:
        """Logits and queries of the unquantized run."""
        rows = [[layer.rows for layer in side] for side in (self.prefix.k, self.prefix.v)]
        with self.subject.queries() as queries:
            logits = self.subject.logits(self.subject.restore(self.prefix, [(rows[0], rows[1])]), self.prefix)
        return logits, queries

    def side(self, which: str, fmt: str) -> Side:
        """Decoded rows of one side, all layers in one format."""
        if (which, fmt) not in self.made:
            layers = self.prefix.k if which == "k" else self.prefix.v
            rows, sizes = zip(*(codecs.through(layer, fmt, keys=which == "k") for layer in layers), strict=True)
            errors = [metrics.relative_error(layer.rows, new) for layer, new in zip(layers, rows, strict=True)]
            self.made[which, fmt] = Side(list(rows), list(sizes), codecs.digest(rows), errors)
        return self.made[which, fmt]

    def mixed(self, which: str, formats: Sequence[str]) -> Side:
        """One side with a format for each layer."""
        sides = [self.side(which, fmt) for fmt in formats]
        chosen = [[getattr(side, name)[i] for i, side in enumerate(sides)] for name in Side.__annotations__]
        return Side(*chosen)

    def correlations(self, side: Side) -> list[float]:
        """Logit correlation of K, by layer."""
        found = []
        for i, (layer, rows, digest) in enumerate(zip(self.prefix.k, side.rows, side.digests, strict=True)):
            known = self.memo.setdefault("correlation", {})
            if digest not in known:
                heads = (len(rows), -1, layer.head)
                true, other = (each.reshape(heads).swapaxes(0, 1) for each in (layer.rows, rows))
                known[digest] = metrics.correlation(self.reference[1][i], true, other)
            found.append(known[digest])
        return found

    def forced(self, k: Side, v: Side) -> dict[str, Any]:
        """The teacher-forced run: KL of each token and the token chosen there."""
        key = hashlib.sha256("".join(k.digests + v.digests).encode()).hexdigest()[:32]
        known = self.memo.setdefault("runs", {})
        if key not in known:
            logits = self.subject.logits(self.subject.restore(self.prefix, [(k.rows, v.rows)]), self.prefix)
            self.memo["choices"] = metrics.choices(self.reference[0], self.subject.never)
            kl = metrics.divergence(self.reference[0], logits)
            known[key] = {"kl": kl.tolist(), "choices": metrics.choices(logits, self.subject.never)}
        result: dict[str, Any] = known[key]
        return result

    def free(self, runs: Sequence[tuple[dict[str, Any], Side, Side]]) -> None:
        """Greedy runs of those that have none yet: ``run["free"]``.

        Up to the first token on which a teacher-forced run disagrees the free run is the unquantized one, so it starts
        there; one that never disagrees is known already.
        """
        answer, waiting = self.prefix.answer, []
        for run, k, v in runs:
            same = [a == b for a, b in zip(run["choices"], self.memo["choices"], strict=True)]
            if "free" not in run and all(same):
                run["free"] = answer
            elif "free" not in run:
                waiting.append((same.index(False), run, k, v))
        waiting.sort(key=lambda item: item[0])
        while waiting:
            batch, waiting = waiting[:MOST_AT_ONCE], waiting[MOST_AT_ONCE:]
            start = batch[0][0]
            cache = self.subject.restore(self.prefix, [(k.rows, v.rows) for _, _, k, v in batch])
            forced = self.prefix.suffix + answer[:start]
            found = self.subject.greedy(cache, [forced] * len(batch), len(answer) - start)
            for (_, run, _, _), tokens in zip(batch, found, strict=True):
                run["free"] = answer[:start] + tokens

    def measure(self, splits: Sequence[Split], *, free: bool) -> list[dict[str, Any]]:
        """One line for each split; free runs that an earlier call made are in it too."""
        lines, runs = [], []
        for split in splits:
            k_formats, v_formats = split.formats(len(self.prefix.k))
            k, v = self.mixed("k", k_formats), self.mixed("v", v_formats)
            run = self.forced(k, v)
            runs.append((run, k, v))
            held = [layer.rows.shape for layer in self.prefix.k]
            lines.append(
                {
                    "kl": run["kl"],
                    "agreed": sum(a == b for a, b in zip(run["choices"], self.memo["choices"], strict=True)),
                    "bytes": sum((a + b) / n for a, b, (n, _) in zip(k.sizes, v.sizes, held, strict=True)),
                    "bits": 8 * (sum(k.sizes) + sum(v.sizes)),
                    "values": 2 * sum(n * dim for n, dim in held),
                    "k_error": k.errors,
                    "v_error": v.errors,
                    "correlation": self.correlations(k),
                }
            )
        if free:
            self.free(runs)
        return [line | {"free": run.get("free")} for line, (run, _, _) in zip(lines, runs, strict=True)]


def summary(lines: Sequence[dict[str, Any]], answers: Sequence[list[int]], tokens: int) -> dict[str, Any]:
    """The figures of one split from its lines, one for each prompt."""

    def by_layer(name: str) -> list[float]:
        return [sum(column) / len(column) for column in zip(*(line[name] for line in lines), strict=True)]

    def mean(values: Sequence[float]) -> float:
        return sum(values) / len(values)

    kl = [mean(line["kl"]) for line in lines]
    pairs = [(answer, line["free"]) for answer, line in zip(answers, lines, strict=True) if line["free"]]
    correlation = by_layer("correlation")
    return {
        "bits_per_value": sum(line["bits"] for line in lines) / sum(line["values"] for line in lines),
        "bytes_per_token": mean([line["bytes"] for line in lines]),
        "k_error": mean(by_layer("k_error")),
        "k_correlation": mean(correlation),
        "k_correlation_worst_layer": min(correlation),
        "v_error": mean(by_layer("v_error")),
        "agreement": sum(line["agreed"] for line in lines) / (tokens * len(lines)),
        "kl": mean(kl),
        "kl_worst_prompt": max(kl),
        "bleu": metrics.bleu(pairs) if pairs else None,
        "bleu_prompts": len(pairs),
        "by_layer": {name: by_layer(name) for name in ("k_error", "correlation", "v_error")},
    }


def _replace(path: Path, text: str) -> None:
    part = path.with_suffix(".part")
    part.write_text(text)
    part.replace(path)


def prefixes(subject: models.Subject, options: argparse.Namespace) -> dict[str, Path]:
    """Where the prefixes are kept, by the names of their texts; those that are missing are computed."""
    folder = cache_dir() / "quality"
    folder.mkdir(exist_ok=True)
    found: dict[str, Path] = {}
    fresh: dict[int, list[tuple[Path, models.Prefix]]] = {}
    for number, (title, text) in enumerate(list(prompts.texts().items())[: options.prompts]):
        started = time.perf_counter()
        ids, suffix = subject.cut(text, number, LENGTHS[number % len(LENGTHS)])
        key = hashlib.sha256(json.dumps([ids, suffix, options.tokens]).encode()).hexdigest()[:16]
        found[title] = path = folder / f"{subject.name}-{key}.npz"
        if not path.exists():
            fresh.setdefault(len(ids), []).append((path, subject.prefill(ids, suffix)))
            print(f"  prefix {number + 1:2}: {len(ids)} tokens, {time.perf_counter() - started:.1f} s", flush=True)
    for length, group in fresh.items():
        started = time.perf_counter()
        subject.answer([prefix for _, prefix in group], options.tokens)
        for path, prefix in group:
            models.save(path, prefix)
        print(f"  {len(group)} answers: {length} tokens, {time.perf_counter() - started:.1f} s", flush=True)
    return found


def measure(name: str, splits: Sequence[Split], options: argparse.Namespace) -> dict[str, Any]:
    """All figures of one model."""
    started = time.perf_counter()
    subject = models.Subject(name)
    print(f"{subject.title}: {subject.shape}, loaded in {time.perf_counter() - started:.0f} s", flush=True)
    lines: list[list[dict[str, Any]]] = []
    answers = []
    for number, (title, path) in enumerate(prefixes(subject, options).items()):
        started = time.perf_counter()
        prefix, memory = models.read(path), path.with_suffix(".json")
        memo = json.loads(memory.read_text()) if memory.exists() else {}
        lines.append(Trial(subject, prefix, memo).measure(splits, free=number < options.bleu_prompts))
        _replace(memory, json.dumps(memo))
        answers.append(prefix.answer)
        took = time.perf_counter() - started
        print(f"  {number + 1:2}/{options.prompts} {title:28} {len(prefix.ids)} tokens, {took:5.1f} s", flush=True)
    return {
        "title": subject.title,
        "shape": subject.shape,
        "prompts": len(lines),
        "tokens": options.tokens,
        "prefix_tokens": list(LENGTHS),
        "python": platform.python_version(),
        "splits": {
            str(split): summary([line[i] for line in lines], answers, options.tokens) for i, split in enumerate(splits)
        },
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, and with ``--write`` renew docs/quality.*."""
    parser = argparse.ArgumentParser(prog="python -m bench.quality", description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="all", choices=["all", *models.MODELS])
    parser.add_argument("--formats", default="", help="K/V pairs with commas between; K/V@2: V of 2 outer layers fp16")
    parser.add_argument("--prompts", type=int, default=20, help="how many, at most 20")
    parser.add_argument("--tokens", type=int, default=64, help="measured behind each prefix")
    parser.add_argument("--bleu-prompts", type=int, default=10, help="prompts that are also answered freely")
    parser.add_argument("--write", action="store_true", help="renew docs/quality.json, .md and .svg with this run")
    parser.add_argument("--render", action="store_true", help="renew docs/quality.md and .svg from the .json, no run")
    options = parser.parse_args(argv)
    from bench import quality_report as report

    if options.render:
        report.write({})
        return 0
    options.prompts = min(options.prompts, len(prompts.SOURCES))
    names = [name for name in options.formats.split(",") if name] or SPLITS
    try:
        splits = [Split.parse(name) for name in names]
    except ValueError as error:
        parser.error(str(error))
    if options.write and options.formats:
        parser.error("--write needs every format: the page compares them")
    found = {}
    for name in models.MODELS if options.model == "all" else [options.model]:
        found[name] = measure(name, splits, options)
        print(report.table(found[name]), flush=True)
    for line in report.verdicts(found):
        print(line)
    if options.write:
        report.write(found)
    return 0


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    sys.exit(main())
