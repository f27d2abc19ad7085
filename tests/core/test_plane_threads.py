"""The plane and its movers as plain C under the compiler's sanitizers: data races, memory errors, leaks."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("plane_stress.c")
CORE = Path(__file__).parents[2] / "pion" / "_core"
CC = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")


@pytest.mark.slow
@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_stress(sanitizer: str, tmp_path: Path):
    """Clients that read, write, stall and vanish, a server that kills some; every byte they get is compared."""
    assert CC, "a C compiler is needed, as for building Pion"
    program = tmp_path / "stress"
    flags = ["-g", "-O1", "-std=gnu11", "-D_GNU_SOURCE", "-fno-omit-frame-pointer", f"-fsanitize={sanitizer}"]
    probe = tmp_path / "probe.c"
    probe.write_text("int main(void) { return 0; }")
    trial = [CC, *flags, str(probe), "-o", str(tmp_path / "probe")]
    if subprocess.run(trial, capture_output=True).returncode or subprocess.run([tmp_path / "probe"]).returncode:
        pytest.skip(f"this compiler or machine has no -fsanitize={sanitizer}")
    subprocess.run([CC, *flags, f"-I{CORE}", str(SOURCE), "-o", str(program), "-lpthread", "-lm"], check=True)
    env = {**os.environ, "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1"}
    done = subprocess.run([program, tmp_path, "5"], capture_output=True, text=True, env=env, timeout=100)
    assert done.returncode == 0, done.stderr[-10_000:]
    assert " 0 failures" in done.stdout
