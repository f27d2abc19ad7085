"""docs/quality.json, .md and .svg: what `bench/quality.py` measured, for people who choose a format."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

DOCS: Final = Path(__file__).resolve().parent.parent / "docs"
FOUR_BITS: Final = ("turbo4/turbo4", "turbo4/mlx4g32", "mlx4g32/mlx4g32")

# What the project asks for: pairs of which one must reach it, agreement at least, KL at most.
BARS: Final = (
    (("int8/int8",), 0.995, 1e-4),
    (("int8/turbo4",), 0.985, 2e-3),
    (("int8/turbo3",), 0.965, 6e-3),
    (FOUR_BITS, 0.978, 8e-3),
)
BLEU_GOAL: Final = ("int8/int8", 0.95)

# Classes of the guidance, by the worst of the models: name, agreement at least, KL at most.
CLASSES: Final = (
    ("the same answers", 0.995, 1e-4),
    ("nearly the same: a different token in fewer than 15 of 1,000", 0.985, 2e-3),
    ("close: in fewer than 35 of 1,000", 0.965, 6e-3),
    ("other answers are to be expected", 0.0, math.inf),
)

INTRO: Final = """# What the formats do to the answers

A prefix that is stored in fewer bits comes back changed. This page says how much that changes what a model answers,
measured on real models; `make quality` measures it again. All figures are in [quality.json](quality.json).

![KL divergence over bits per value](quality.svg)

"""

METHOD: Final = """
## What was measured

* **Models.** {models}.
  Weights and arithmetic in fp32, so that nothing but the format differs.
* **Prompts.** Up to {prompts} texts: language reference, documentation, source code, lists, dialogues, tables of
  numbers, JSON, logs, prose; from what a Python installation contains and from templates
  (`bench/quality_prompts.py`). They are cut to prefixes of {lengths} tokens, which end inside a group of rows.
  SmolLM2 is an instruct model and is asked about the text; Gemma 3 270M is a base model and continues it.
* **The cache.** K and V of the prefix are computed once, K after RoPE as the cache holds it, encoded and decoded by the
  compiled core exactly as the store does it, and put back. The request's own tokens are computed after that and are not
  quantized. In Gemma's sliding-window layers only the last 512 rows, which the rotating cache still holds, are stored:
  in the order of their positions, with each layer's own RoPE base.
* **Turbo keys.** On side K turbo formats are stored as groups of 64 positions per channel; rows that do not fill a
  group stay in fp16 and are counted as such.

The columns of the tables:

* **K/V**: formats of keys and values; with `@2` V of the first and last two layers is fp16 (`boundary_protect=2`).
* **bits**: stored bits per value, K and V together; scales, norms and the rows of unfinished groups counted.
* **bytes**: stored bytes of one token, all layers, K and V, counted in the same way.
* **key error**, **value error**: norm of the difference over the norm of the rows, mean of layers and prompts.
* **logits**: correlation of the attention logits with the true ones over the positions of the prefix, for the queries
  of the answer; mean of all layers, and the layer with the lowest.
* **agreement**: share of the {tokens} tokens behind each prefix on which the most likely next token is the same, given
  the same tokens before it: those that the unquantized run chose.
* **KL**: mean Kullback-Leibler divergence of the next-token distributions at the same places, in nats.
* **BLEU**: free greedy runs of {tokens} tokens against the unquantized run: corpus BLEU-4 over token ids, without
  smoothing. It is harsh: one different token early on changes all that follow.

Agreement is a share of at least {decisions} decisions: its standard error is about {error} at 0.98.

## Run it again

```
make quality                                                     # both models, all formats, renews this page
.venv/bin/python -m bench.quality --model smollm2 --formats int8/turbo4,int8/fp16   # prints, writes nothing
.venv/bin/python -m bench.quality --prompts 5 --tokens 32        # a quick look
```

Prefixes and results are kept in `$PION_CACHE/quality`, about 1.2 GB; a second run computes only what a change of a
format changed.
"""


def met(figures: dict[str, Any], agreement: float, kl: float) -> bool:
    """Whether a pair's figures reach a bar."""
    return bool(figures["agreement"] >= agreement and figures["kl"] <= kl)


def bars(found: dict[str, Any]) -> Iterator[tuple[str, str, str, str, bool]]:
    """(model, pair, what is asked, what was measured, met) for each bar whose pair was measured."""
    for model in found.values():
        splits = model["splits"]
        for names, agreement, kl in BARS:
            have = [name for name in names if name in splits]
            if have:
                name = min(have, key=lambda name: (not met(splits[name], agreement, kl), splits[name]["kl"]))
                f = splits[name]
                asked, got = f"{agreement} / {kl:.0e}", f"{f['agreement']:.4f} / {f['kl']:.1e}"
                yield model["title"], name, asked, got, met(f, agreement, kl)
        name, goal = BLEU_GOAL
        if name in splits and splits[name]["bleu"] is not None:
            bleu = splits[name]["bleu"]
            yield model["title"], f"{name}, BLEU", f"{goal}", f"{bleu:.3f}", bleu >= goal


def verdicts(found: dict[str, Any]) -> Iterator[str]:
    """The bars for a terminal."""
    for title, name, asked, got, ok in bars(found):
        yield f"{'ok  ' if ok else 'LOW '} {title:24} {name:20} asked {asked:14} measured {got}"


def table(model: dict[str, Any]) -> str:
    """The figures of one model for a terminal."""
    head = f"{'K/V':18}{'bits':>6}{'bytes':>8}{'k err':>9}{'k corr':>9}{'worst':>9}{'v err':>9}"
    lines = [f"{head}{'agree':>8}{'KL':>10}{'BLEU':>7}"]
    for name, f in model["splits"].items():
        bleu = "-" if f["bleu"] is None else f"{f['bleu']:.3f}"
        lines.append(
            f"{name:18}{f['bits_per_value']:6.2f}{f['bytes_per_token']:8.0f}{f['k_error']:9.5f}{f['k_correlation']:9.5f}"
            f"{f['k_correlation_worst_layer']:9.5f}{f['v_error']:9.5f}{f['agreement']:8.4f}{f['kl']:10.2e}{bleu:>7}"
        )
    return "\n".join(lines)


def _table(model: dict[str, Any]) -> Iterator[str]:
    yield "| K/V | bits | bytes | key error | logits: mean, worst layer | value error | agreement | KL | BLEU |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for name, f in sorted(model["splits"].items(), key=lambda item: item[1]["kl"]):
        bleu = "-" if f["bleu"] is None else f"{f['bleu']:.3f}"
        cells = [
            name,
            f"{f['bits_per_value']:.2f}",
            f"{f['bytes_per_token']:,.0f}",
            f"{f['k_error']:.4f}",
            f"{f['k_correlation']:.4f}, {f['k_correlation_worst_layer']:.4f}",
            f"{f['v_error']:.4f}",
            f"{f['agreement']:.4f}",
            f"{f['kl']:.1e}",
            bleu,
        ]
        yield f"| {' | '.join(cells)} |"


def _guidance(found: dict[str, Any]) -> Iterator[str]:
    """Formats by what they did to every model, smallest first. It says nothing that is not in the tables."""
    common = set.intersection(*(set(model["splits"]) for model in found.values()))
    worst = {
        name: {
            "agreement": min(model["splits"][name]["agreement"] for model in found.values()),
            "kl": max(model["splits"][name]["kl"] for model in found.values()),
            "bits_per_value": max(model["splits"][name]["bits_per_value"] for model in found.values()),
        }
        for name in common
    }
    yield "## Which one to take"
    yield ""
    sizes = " and ".join(model["title"] for model in found.values())
    yield f"By the worst figures of {sizes}, smallest format first."
    yield "Larger models were not measured: check yours."
    yield ""
    yield "| what to expect | K/V (bits per value, agreement, KL) |"
    yield "|---|---|"
    left = sorted(worst, key=lambda name: (worst[name]["bits_per_value"], worst[name]["kl"]))
    for title, agreement, kl in CLASSES:
        inside = [name for name in left if met(worst[name], agreement, kl)]
        left = [name for name in left if name not in inside]
        shown = [
            f"{name} ({worst[name]['bits_per_value']:.1f}, {worst[name]['agreement']:.3f}, {worst[name]['kl']:.0e})"
            for name in inside
        ]
        yield f"| {title} | {', '.join(shown) or 'none'} |"
    yield ""


def markdown(found: dict[str, Any]) -> str:
    """The page."""
    first = next(iter(found.values()))
    lines = list(_guidance(found))
    for model in found.values():
        bleu = sorted({f["bleu_prompts"] for f in model["splits"].values()} - {0})
        counted = f"{model['prompts']} prompts, {model['tokens']} tokens behind each"
        counted += f"; BLEU on {' or '.join(map(str, bleu))} of them" if bleu else ""
        lines += [f"## {model['title']}", "", f"{model['shape']}. {counted}.", "", *_table(model), ""]
    lines += ["## What the project asks for", "", "Agreement / KL; of the 4-bit pairs the better one counts.", ""]
    lines += ["| model | K/V | asked | measured | |", "|---|---|---|---|---|"]
    for title, name, asked, got, ok in bars(found):
        lines.append(f"| {title} | {name} | {asked} | {got} | {'reached' if ok else '**not reached**'} |")
    decisions = min(model["prompts"] for model in found.values()) * first["tokens"]
    return (
        INTRO
        + "\n".join(lines)
        + "\n"
        + METHOD.format(
            models="; ".join(f"{model['title']} ({model['shape']})" for model in found.values()),
            prompts=max(model["prompts"] for model in found.values()),
            lengths=", ".join(map(str, first["prefix_tokens"])),
            tokens=first["tokens"],
            decisions=f"{decisions:,}",
            error=f"{math.sqrt(0.98 * 0.02 / decisions):.3f}",
        )
    )


# ---- the plot ---------------------------------------------------------------------------------------------------

WIDTH, HEIGHT, LEFT, TOP, GAP = 490, 460, 62, 44, 24
BITS: Final = (2.0, 18.0)
DECADES: Final = (-7, 0)
INK, GRID, DOTS = "#333333", "#dddddd", ("#1f6fb2", "#c2571a")


def _x(bits: float) -> float:
    low, high = (math.log2(value) for value in BITS)
    return LEFT + (math.log2(min(max(bits, BITS[0]), BITS[1])) - low) / (high - low) * (WIDTH - LEFT - GAP)


def _y(kl: float) -> float:
    place = min(max(math.log10(max(kl, 1e-300)), DECADES[0]), DECADES[1])
    return TOP + (DECADES[1] - place) / (DECADES[1] - DECADES[0]) * (HEIGHT - TOP - 48)


def _text(x: float, y: float, text: str, *, size: int = 11, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{INK}">{text}</text>'


def _panel(model: dict[str, Any], colour: str) -> Iterator[str]:
    right, bottom = WIDTH - GAP, HEIGHT - 48
    yield _text(LEFT, TOP - 18, model["title"], size=14)
    for decade in range(DECADES[0], DECADES[1] + 1):
        y = _y(10.0**decade)
        yield f'<path d="M{LEFT} {y:.1f}H{right}" stroke="{GRID}"/>' + _text(
            LEFT - 6, y + 4, f"1e{decade}", anchor="end"
        )
    for bits in (2, 3, 4, 5, 6, 8, 9, 12, 16):
        yield f'<path d="M{_x(bits):.1f} {TOP}V{bottom}" stroke="{GRID}"/>'
        yield _text(_x(bits), bottom + 16, str(bits), anchor="middle")
    yield _text((LEFT + right) / 2, bottom + 36, "stored bits per value", anchor="middle")
    yield _text(LEFT, TOP - 4, "mean KL divergence of the next token, nats", size=10)
    dots = {name: (_x(f["bits_per_value"]), _y(f["kl"])) for name, f in model["splits"].items()}
    boxes = [(x - 5, y - 5, x + 5, y + 5) for x, y in dots.values()]
    for name, (x, y) in sorted(dots.items(), key=lambda item: item[1]):
        box = next(_places(x, y, 5.6 * len(name), boxes))
        boxes.append(box)
        edge, anchor = (box[0], "start") if box[0] > x else (box[2], "end")
        yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"/>'
        if abs(box[3] - 4 - y) > 6:
            yield f'<path d="M{x:.1f} {y:.1f}L{edge:.1f} {box[3] - 4:.1f}" stroke="{colour}" stroke-width="0.5"/>'
        yield _text(edge, box[3] - 1, name, size=10, anchor=anchor)


Box = tuple[float, float, float, float]  # left, top, right, bottom


def _places(x: float, y: float, width: float, taken: list[Box]) -> Iterator[Box]:
    """Where a label of this width may stand beside a dot, nearest first."""
    for step in range(0, 400, 2):
        for middle in (y - step, y + step):
            for left in (x + 7, x - 7 - width):
                box = (left, middle - 5, left + width, middle + 5)
                inside = left > LEFT and box[2] < WIDTH - 4 and box[1] > TOP and box[3] < HEIGHT - 48
                apart = all(box[0] > c or box[2] < a or box[1] > d or box[3] < b for a, b, c, d in taken)
                if inside and apart:
                    yield box
    yield (x + 7, y - 5, x + 7 + width, y + 5)


def svg(found: dict[str, Any]) -> str:
    """One panel for each model: KL over bits per value, both axes logarithmic; lower left is better."""
    width = WIDTH * len(found)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {HEIGHT}" font-family="sans-serif">',
        "<title>KL divergence of the next token over stored bits per value</title>",
        f'<rect width="{width}" height="{HEIGHT}" fill="#ffffff"/>',
    ]
    for i, model in enumerate(found.values()):
        out += [f'<g transform="translate({WIDTH * i} 0)">', *_panel(model, DOTS[i % len(DOTS)]), "</g>"]
    return "\n".join([*out, "</svg>"]) + "\n"


def _short(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: _short(each) for key, each in value.items()}
    return [_short(each) for each in value] if isinstance(value, list) else value


def write(found: dict[str, Any], folder: Path = DOCS) -> None:
    """Renew the three files; models that this run did not measure keep their figures."""
    folder.mkdir(exist_ok=True)
    path = folder / "quality.json"
    held = json.loads(path.read_text()) if path.exists() else {}
    known = held | found
    merged = {name: _short(known[name]) for name in sorted(known, reverse=True)}  # the smaller model first
    flat = re.sub(
        r"\[\s+([^\[\]]*?)\s+\]", lambda found: f"[{' '.join(found[1].split())}]", json.dumps(merged, indent=1)
    )
    path.write_text(flat + "\n")  # lists of numbers on one line
    (folder / "quality.md").write_text(markdown(merged))
    (folder / "quality.svg").write_text(svg(merged))
