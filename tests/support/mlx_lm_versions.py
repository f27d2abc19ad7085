"""Other versions of mlx-lm, each in a folder of its own."""

from __future__ import annotations

import fcntl
import subprocess
import sys
from pathlib import Path

from pion.demo import blas
from tests.support.peers import missing


def mlx_lm_folder(version: str) -> Path:
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
