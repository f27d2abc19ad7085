"""Loading a prompt cache of a real model, against mlx-lm's own cache file."""

from __future__ import annotations

import subprocess
import sys

from bench.harness import Result, bench
from bench.peers import pion


@bench("load_2048")
def load_cache() -> Result:
    """In a process of its own: importing mlx-lm lowers the descriptor limit for good."""
    with pion(pin=False) as server:
        url = f"pion://{server.host}:{server.port}"
        command = [sys.executable, "-m", "pion.demo.breakeven", "--lengths", "2048", "--url", url]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    _, _, _, fetch, _, file, *_ = done.stdout.splitlines()[-1].replace(",", "").split()
    ours, theirs = float(fetch), float(file)
    return Result(
        "load_2048",
        ours,
        "ms",
        theirs,
        theirs / ours,
        note="warm get_or_prefill over TCP / mlx-lm's load_prompt_cache + eval; SmolLM2, 2,048 tokens, fp32",
    )
