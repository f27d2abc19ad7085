"""`python -m tests.support.in_another_process`: asks a server for a prefix and writes down what it got.

Arguments as JSON: port, family, dtype, seed, ns, ids, suffix, options of PionPromptCache, path of the logits.
Prints the statistics as JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from pion import PionPromptCache
from tests.support import families


def ask(path: Path, **job: Any) -> tuple[dict[str, Any], np.ndarray[Any, Any]]:
    """Run it in a process of its own: (statistics, logits behind the suffix)."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([os.getcwd(), *filter(None, sys.path)])}
    command = [sys.executable, "-m", __name__, json.dumps({**job, "path": str(path)})]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise AssertionError(done.stderr)
    return json.loads(done.stdout.splitlines()[-1]), np.load(path)


def main(job: dict[str, Any]) -> None:
    """Do the jobs, one after the other, of one process."""
    out = []
    said: dict[str, Any] = {}
    for one in job["jobs"]:
        model = families.tiny(one["family"], one.get("dtype", "float32"))
        with PionPromptCache(model, port=job["port"], **{"vquant": "native", **one.get("options", {})}) as pc:
            cache = pc.get_or_prefill(one["ids"], one["ns"])
            out.append(families.logits(model, cache, job["suffix"]))
            said[one["ns"]] = pc.stats()
    np.save(job["path"], np.stack(out))
    print(json.dumps(said))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
