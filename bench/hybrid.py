"""Retrieved passages from packs, against computing stub, passages and question for every query (text-RAG).

40 questions, each with the passage that answers it and two others, SmolLM2-135M in fp32. The passages were written for
this benchmark, so that no model knows them. Timed is what a user waits for, up to the first token of the answer. Token
agreement: the answer of text-RAG is fed to the composed cache token by token; counted is where both would have said the
same. ``python -m bench.hybrid`` prints what is found for one passage and for three.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench.harness import Result, bench
from bench.peers import pion

PAIRS = Path(__file__).parent / "passages.json"
TOKENS = 12  # of each answer
_STUB = (
    "<|im_start|>system\nYou answer questions from notes, in a few words.<|im_end|>\n"
    "<|im_start|>user\nThese are notes.\n"
)
_ASK = "\nAnswer from the notes: {}<|im_end|>\n<|im_start|>assistant\n"


@dataclass
class Way:
    """One way to come to an answer: milliseconds to the first token, tokens as text-RAG, answers that were right."""

    ms: list[float] = field(default_factory=list)
    same: int = 0
    first: int = 0
    right: int = 0
    logit_difference: float = 0.0


def _answer(model: Any, cache: list[Any], rest: list[int]) -> Any:
    """The logits behind the prompt, evaluated."""
    import mlx.core as mx

    last = model(mx.array([rest]), cache=cache)[0, -1]
    mx.eval(last)
    return last


def _says(model: Any, cache: list[Any], last: Any, count: int = TOKENS) -> tuple[list[int], list[Any]]:
    import mlx.core as mx

    said, logits = [int(mx.argmax(last).item())], [last]
    while len(said) < count:
        logits.append(model(mx.array([said[-1:]]), cache=cache)[0, -1])
        said.append(int(mx.argmax(logits[-1]).item()))
    return said, logits


def measure(model: Any, tok: Any, hybrids: dict[str, Any], passages: int) -> dict[str, Way]:
    """Every question in every way, in turn."""
    import mlx.core as mx
    from mlx_lm.models.cache import make_prompt_cache

    def ids(text: str) -> list[int]:
        return list(tok.encode(text, add_special_tokens=False))

    pairs = json.loads(PAIRS.read_text("utf-8"))
    stub, packs = ids(_STUB), [ids(f"- {pair['passage']}\n") for pair in pairs]
    for hr in hybrids.values():
        hr.set_shared_stub(stub)
        for number, pack in enumerate(packs):
            hr.ingest_pack(str(number), pack)
    ways = {"text": Way(), **{name: Way() for name in hybrids}}
    for number, pair in enumerate(pairs):
        chosen = [(number + step) % len(pairs) for step in range(passages)]
        turn = number % passages  # the right one stands first, second, third
        chosen = chosen[turn:] + chosen[:turn]
        ask = ids(_ASK.format(pair["question"]))

        def right(said: list[int], wanted: str = pair["answer"]) -> bool:
            return wanted.lower() in tok.decode(said).lower()

        started = time.perf_counter()
        cache = make_prompt_cache(model)
        last = _answer(model, cache, [*stub, *(token for one in chosen for token in packs[one]), *ask])
        ways["text"].ms.append((time.perf_counter() - started) * 1e3)
        said, logits = _says(model, cache, last)
        ways["text"].right += right(said)
        for name, hr in hybrids.items():
            way = ways[name]
            started = time.perf_counter()
            cache, rest = hr.prepare_multi([str(one) for one in chosen], ask)
            last = _answer(model, cache, rest)
            way.ms.append((time.perf_counter() - started) * 1e3)
            rows = mx.concatenate([last[None], model(mx.array([said[:-1]]), cache=cache)[0]])
            same = (mx.argmax(rows, axis=-1) == mx.array(said)).tolist()
            way.same += sum(same)
            way.first += same[0]
            way.logit_difference = max(way.logit_difference, mx.abs(rows - mx.stack(logits)).max().item())
            for layer in cache:
                layer.trim(len(said) - 1)
            way.right += right(_says(model, cache, last)[0])
    return ways


def main() -> None:
    """Print a JSON object: ways by number of passages. Argument: the URL of a server."""
    from pion.demo import blas, smollm2

    blas.install()
    model, tok = smollm2.load("float32")
    from pion import HybridRetrievalCache

    found = {}
    for passages in (1, 3):
        hybrids = {"inproc": HybridRetrievalCache(model)}
        with HybridRetrievalCache(model, "pion", url=sys.argv[1]) as hr:
            hybrids["pion"] = hr
            found[passages] = {name: asdict(way) for name, way in measure(model, tok, hybrids, passages).items()}
    print(json.dumps(found))


@bench("rag_inproc", "rag_pion", "rag_agreement", "rag_agreement_pion", "rag_agreement_one")
def retrieval() -> Iterator[Result]:
    """In a process of its own: importing mlx-lm lowers the descriptor limit for good."""
    with pion(pin=False) as server:
        command = [sys.executable, "-m", "bench.hybrid", f"pion://{server.host}:{server.port}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    found = json.loads(done.stdout.splitlines()[-1])
    three, places = found["3"], len(found["3"]["text"]["ms"]) * TOKENS
    text = statistics.median(three["text"]["ms"])
    for name in ("inproc", "pion"):
        ms = three[name]["ms"]
        ours = statistics.median(ms)
        note = "to the first token, 3 of 40 passages, SmolLM2 fp32 / computing all of it"
        yield Result(f"rag_{name}", ours, "ms", text, text / ours, note=note, rounds=len(ms), spread=[min(ms), max(ms)])
    for name, way in (
        ("rag_agreement", three["inproc"]),
        ("rag_agreement_pion", three["pion"]),
        ("rag_agreement_one", found["1"]["inproc"]),
    ):
        base = found["1" if name.endswith("one") else "3"]["text"]["right"]
        note = f"tokens as text-RAG; first token {way['first']}/40; right answers {way['right']}, text-RAG {base}"
        yield Result(name, 100 * way["same"] / places, "%", note=note, rounds=40)


if __name__ == "__main__":
    main()
