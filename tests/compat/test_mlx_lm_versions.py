"""Old and new mlx-lm: what one version stored, every other one fetches, and decodes alike."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pion.demo import blas
from pion.testing import server as start_server
from tests.support import models
from tests.support.peers import missing

pytestmark = [pytest.mark.compat, pytest.mark.timeout(600)]
models.need_mlx()

INSTALLED = "installed"
VERSIONS = (INSTALLED, "0.20.1", "0.31.3")
PROGRAM = """
import json, sys
from tests.support import models
from pion import PionPromptCache
import mlx_lm
model = models.tiny_llama("bfloat16", rope_theta=5e5)
with PionPromptCache(model, port=int(sys.argv[1])) as pc:
    cache = pc.get_or_prefill(list(range(40)), "versions")
    tokens = models.greedy(model, cache, [3, 1, 4], 12)
print(json.dumps({"from": mlx_lm.__file__, "hits": pc.hits, "offset": cache[0].offset, "tokens": tokens}))
"""


def folder(version: str) -> Path:
    """Where a version of mlx-lm lies; installed there on first use, without its requirements."""
    home = blas.cache_dir() / "peers" / f"mlx-lm-{version}"
    home.parent.mkdir(exist_ok=True)
    with open(f"{home}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (home / "ready").exists():
            command = [
                sys.executable,
                "-m",
                "pip",
                "install",
                "--quiet",
                "--no-deps",
                "--upgrade",
                "--target",
                str(home),
            ]
            done = subprocess.run([*command, f"mlx-lm=={version}"], capture_output=True, text=True, check=False)
            if done.returncode:
                missing(f"mlx-lm {version} ({done.stderr.strip()[-300:]})")
            (home / "ready").touch()
    return home


def run(version: str, port: int) -> dict[str, Any]:
    path = [os.getcwd(), *filter(None, sys.path)]
    if version != INSTALLED:
        path.insert(0, str(folder(version)))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    command = [sys.executable, "-c", PROGRAM, str(port)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert version == INSTALLED or f"mlx-lm-{version}" in result["from"]
    return result


@pytest.mark.parametrize("first", [INSTALLED, VERSIONS[1]])
def test_one_version_fetches_what_another_stored(tmp_path: Path, first: str) -> None:
    with start_server("--kvcache", dir=tmp_path) as server:
        cold = run(first, server.port)
        warm = {version: run(version, server.port) for version in VERSIONS if version != first}
    assert cold["hits"] == 0
    assert {version: seen["hits"] for version, seen in warm.items()} == dict.fromkeys(warm, 1)
    assert {version: seen["tokens"] for version, seen in warm.items()} == dict.fromkeys(warm, cold["tokens"])
