"""Old and new mlx-lm: what one version stored, every other one fetches, and decodes alike."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pion.testing import server as start_server
from tests.support import models
from tests.support.mlx_lm_versions import mlx_lm_folder

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


PATCH_PROGRAM = """
import json, os, sys
from tests.support import families, models
import pion, mlx_lm
from pion.client.caches import new_cache
mx = models.mx
ids, suffix = families.tokens(150), families.tokens(7, 2)
seen = {}
pion.install_pion_attention_patch()
for family in sys.argv[2:]:
    model = families.tiny(family)
    cache = new_cache(model)
    mx.eval(model(mx.array([ids]), cache=cache))
    want = models.greedy(model, cache, suffix, 30)
    for lane in ("process", "resp"):
        os.environ["PION_ATTEND_LANE"] = lane
        with pion.PionPromptCache(model, vquant="native", port=int(sys.argv[1]), stage2=True) as pc:
            pc.get_or_prefill(ids, family)
            cache = pion.make_pion_prompt_cache(model, family, pc, len(ids))
            got = models.greedy(model, cache, suffix, 30)
            seen[f"{family} {lane}"] = got == want and pc.stats()["attend"]["lanes"][lane] > 0
print(json.dumps({"from": mlx_lm.__file__, "seen": seen, "report": pion.mlx_lm_seam_report()}))
"""


FILE_PROGRAM = """
import hashlib, json, sys
from tests.support import models
from pion import PionPromptCache
from pion.tools.portability import export_main, import_main
import mlx_lm, mlx_lm.models.cache as module
mx = models.mx
port, file, theirs = sys.argv[1:4]
model = models.tiny_llama("bfloat16", hidden_size=128, num_hidden_layers=3, rope_theta=1e4)
ids = list(range(40))
sums = []
with PionPromptCache(model, port=int(port), vquant="mlx4g32", k_format="mlx4g32", boundary_protect=1) as pc:
    cache = pc.get_or_prefill(ids, "file")
for imported in sys.argv[4:]:
    assert import_main(["--port", port, imported, "from another"]) == 0
    with PionPromptCache(port=int(port)) as pc:
        sums.append(pc.lookup("from another"))
        pc.drop("from another")
assert export_main(["--port", port, "file", file]) == 0
loaded, metadata = module.load_prompt_cache(file, return_metadata=True)
assert [type(c).__name__ for c in loaded] == ["KVCache", "QuantizedKVCache", "KVCache"]
firsts = [c.keys[0] if isinstance(c.keys, (list, tuple)) else c.keys for c in loaded]
words = [bytes(memoryview(mx.contiguous(keys[:, :, :40]).view(mx.uint16))) for keys in firsts]
cache = [module.KVCache() for _ in range(3)]
model(mx.array([ids]), cache=cache)
quantized = [c.to_quantized(group_size=32, bits=8) for c in cache]
module.save_prompt_cache(theirs, [cache[0], quantized[1], cache[2]], {"model": "tiny"})
print(json.dumps({
    "from": mlx_lm.__file__, "offsets": [c.offset for c in loaded], "namespace": metadata["pion_namespace"],
    "sum": hashlib.sha256(b"".join(words)).hexdigest(), "hits": sums,
}))
"""


def run(version: str, *arguments: object, program: str = PROGRAM) -> dict[str, Any]:
    path = [os.getcwd(), *filter(None, sys.path)]
    if version != INSTALLED:
        path.insert(0, str(mlx_lm_folder(version)))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    command = [sys.executable, "-c", program, *map(str, arguments)]
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


@pytest.mark.parametrize("version", VERSIONS)
def test_the_attention_patch_fits_every_version(tmp_path: Path, version: str) -> None:
    """Masks were arrays up to 0.21, and are words or made by the cache since."""
    names = ["llama"] if version == "0.20.1" else ["llama", "gemma3"]  # which knows no Gemma3
    with start_server("--kvcache", dir=tmp_path) as server:
        found = run(version, server.port, *names, program=PATCH_PROGRAM)
    assert found["seen"] == dict.fromkeys((f"{name} {lane}" for name in names for lane in ("process", "resp")), True)
    assert found["report"]["signature_ok"]
    assert version in (INSTALLED, found["report"]["mlx_lm_version"])


def test_files_are_those_of_the_version_that_is_installed(tmp_path: Path) -> None:
    """Each version loads what was exported beside it; and every version's files, quantized layers included, can be
    imported beside every other one."""
    seen: dict[str, dict[str, Any]] = {}
    with start_server("--kvcache", dir=tmp_path / "data") as server:
        for version in VERSIONS:
            names = [f"{kind}-{version}.safetensors" for kind in ("exported", "theirs")]
            others = [tmp_path / f"theirs-{other}.safetensors" for other in seen]
            files = [*(tmp_path / name for name in names), *others]
            seen[version] = run(version, server.port, *files, program=FILE_PROGRAM)
        last = [tmp_path / f"theirs-{version}.safetensors" for version in VERSIONS]
        again = run(
            INSTALLED, server.port, tmp_path / "x.safetensors", tmp_path / "y.safetensors", *last, program=FILE_PROGRAM
        )
    assert again["hits"] == [True, True, True]
    assert [len(result["hits"]) for result in seen.values()] == [0, 1, 2]
    for result in seen.values():
        assert result["offsets"] == [40, 40, 40]
        assert result["namespace"] == "file"
        assert result["sum"] == again["sum"]
