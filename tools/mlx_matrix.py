"""The client's tests on several versions of mlx-lm, each in a virtual environment of its own.

`make mlx-matrix` runs all; `python tools/mlx_matrix.py 0.28.4 newest --pytest "-k slots"` some, and tells pytest more.
Environments are kept in `$PION_CACHE/mlx-matrix`, so that a second run starts at once. `seam` in the table is a look at
what the client stands on in that version, before any test runs.

mlx-lm's releases need certain versions of mlx and of transformers, which their metadata does not always bound from
above; the table says which. On Linux an mlx for the CPU is needed, which exists from 0.29 on.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import venv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Version:
    """A version of mlx-lm.

    Attributes:
        mlx: requirement; the newest that this mlx-lm is known to work with.
        more: further requirements.
    """

    mlx: str
    more: tuple[str, ...]


# The floor that pyproject.toml promises; the last with a MambaCache; the last with meta_state; what there is.
VERSIONS = {
    "0.20.1": Version("<0.33", ("transformers<5", "sentencepiece")),
    "0.28.4": Version("<0.33", ("transformers<5", "sentencepiece")),
    "0.31.3": Version("<0.33", ("transformers>=5", "sentencepiece")),
    "newest": Version("", ("transformers>=5", "sentencepiece")),
}
# What the tests need of mlx-lm is its models and caches; its server and its data sets stay away.
REQUIRES = ("numpy", "protobuf", "pyyaml", "jinja2", "trio", "sortedcontainers", "redis")
TESTS = ("pytest", "pytest-timeout", "pytest-trio", "hypothesis", "trustme", "gguf", "setuptools>=77")
CLIENT = ("tests/client",)

SEAM = """
import json, warnings
warnings.simplefilter("ignore")
from importlib.metadata import version
import mlx.core as mx
from mlx_lm.models import cache
from pion.client.slots import _KINDS, structure
made = {"RotatingKVCache": dict(max_size=8), "ChunkedKVCache": dict(chunk_size=8), "ArraysCache": dict(size=2)}
here = [name for name in _KINDS if hasattr(cache, name)]
structure([getattr(cache, name)(**made.get(name, {})) for name in here])
print(json.dumps({"mlx-lm": version("mlx-lm"), "mlx": mx.__version__, "classes": here}))
"""


def environment(name: str, version: Version, cache: Path) -> Path:
    """The interpreter of a version's environment; made, or completed, when it is not there."""
    home = cache / "mlx-matrix" / name
    python = home / "bin" / "python"
    ready = home / "ready"
    mlx = f"mlx[cpu]{version.mlx}" if sys.platform == "linux" else f"mlx{version.mlx}"
    lm = "mlx-lm" if name == "newest" else f"mlx-lm=={name}"
    wanted = "\n".join((lm, mlx, *version.more, *REQUIRES, *TESTS))
    if ready.exists() and ready.read_text() == wanted:
        return python
    print(f"mlx-lm {name}: installing", flush=True)
    if not python.exists():
        venv.create(home, with_pip=True)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, mlx, *version.more, *REQUIRES, *TESTS], check=True)
    subprocess.run([*pip, "--no-deps", lm], check=True)
    ready.write_text(wanted)
    return python


def passed(text: str) -> str:
    """The last line of pytest."""
    lines = [line for line in text.splitlines() if re.search(r"\d+ (passed|failed|error)", line)]
    return lines[-1].strip("= ") if lines else "no tests ran"


def main(argv: Sequence[str]) -> int:
    """Run the tests; 0 when all versions pass."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="*", help=f"of {', '.join(VERSIONS)}; all by default")
    parser.add_argument("--pytest", default="", help="further arguments for pytest, in one text")
    args = parser.parse_args(argv)
    unknown = [name for name in args.versions if name not in VERSIONS]
    if unknown:
        parser.error(f"unknown versions {unknown} (want {', '.join(VERSIONS)})")
    cache = Path(os.environ.get("PION_CACHE") or Path.home() / ".cache" / "pion")
    failed = []
    for name in args.versions or VERSIONS:
        python = environment(name, VERSIONS[name], cache)
        env = {**os.environ, "PYTHONPATH": str(ROOT), "PION_CACHE": str(cache)}
        seam = subprocess.run([python, "-c", SEAM], cwd=ROOT, env=env, capture_output=True, text=True, check=False)
        print(f"mlx-lm {name}: seam {seam.stdout.strip() or seam.stderr.strip()[-500:]}", flush=True)
        command = [str(python), "-m", "pytest", "-q", "-m", "not slow", *CLIENT, *shlex.split(args.pytest)]
        tests = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
        print(f"mlx-lm {name}: {passed(tests.stdout)}", flush=True)
        if seam.returncode or tests.returncode:
            failed.append(name)
            print(tests.stdout[-6000:], tests.stderr[-2000:], flush=True)
    print("failed: " + ", ".join(failed) if failed else "all passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
