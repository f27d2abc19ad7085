"""Compile the C of the core for the machines that this one is not.

Every header goes through the host's compiler and through clang (PyPI `ziglang`) for Linux and macOS on 64-bit ARM,
with warnings as errors: the kqueue, F_PREALLOCATE and sendfile variants are read by a compiler at least. They are plain
C and need no Python.h. The C that Cython generated from the .pyx files, where a build left it, follows for macOS with
this machine's Python.h; what a Mac's differs in and a compilation notices is put right by MAC_CONFIG.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

CORE = Path(__file__).resolve().parent.parent / "pion" / "_core"
TARGETS = ("aarch64-macos", "aarch64-linux-gnu")
FLAGS = ["-std=gnu11", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off"]
STRICT = ["-O2", "-Wall", "-Wextra", "-Wno-unused-function", "-Werror"]

# Python's own configuration leaves these out on macOS, where they would hide sendfile and more.
MAC_CONFIG = "#include <pyconfig.h>\n#undef _POSIX_C_SOURCE\n#undef _XOPEN_SOURCE\n"


def platform_macros(target: str) -> list[str]:
    """What setup.py or the target's own Python would define."""
    return [] if "macos" in target else ["-D_GNU_SOURCE"]


def compilers() -> dict[str, list[str]]:
    zig = [sys.executable, "-m", "ziglang", "cc", "-target"]
    host = os.environ.get("CC", sysconfig.get_config_var("CC") or "cc").split()
    return {"this machine": host, **{target: [*zig, target] for target in TARGETS}}


def compile_one(label: str, command: list[str], source: Path, extra: list[str], out: Path) -> str:
    """Empty, or what the compiler said."""
    target = out / f"{label}-{source.stem}.o".replace(" ", "-")
    line = [*command, *FLAGS, *extra, f"-I{CORE}", "-c", str(source), "-o", str(target)]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else f"{label}: {source.name}\n{done.stderr}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--headers-only", action="store_true", help="leave out the generated C")
    options = parser.parse_args()
    headers = sorted(path.name for path in CORE.glob("*.h"))
    generated = [] if options.headers_only else sorted(CORE.glob("*.c"))
    python_headers = ["-w", "-O0", f"-I{sysconfig.get_path('include')}"]
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(os.cpu_count()) as pool:
        work = Path(name)
        alone = []
        for header in headers:
            path = work / f"{Path(header).stem}_h.c"
            path.write_text(f'#include "{header}"\nint pion_{path.stem}(void);\n')
            alone.append(path)
        together = work / "all_headers.c"
        together.write_text("".join(f'#include "{header}"\n' for header in headers) + "int pion_all(void);\n")
        mac_config = work / "mac_config.h"
        mac_config.write_text(MAC_CONFIG)
        jobs = []
        for label, command in compilers().items():
            macros = platform_macros(label if label in TARGETS else sys.platform.replace("darwin", "macos"))
            for source in [together] if label in TARGETS else [*alone, together]:
                jobs.append(pool.submit(compile_one, label, command, source, [*STRICT, *macros], work))
            if "macos" in label:
                extra = [*python_headers, *macros, "-include", str(mac_config)]
                for source in generated:
                    jobs.append(pool.submit(compile_one, label, command, source, extra, work))
        errors = [job.result() for job in jobs if job.result()]
    if errors:
        print("\n".join(errors))
        return 1
    print(f"headers: {len(headers)} headers compile for {', '.join(compilers())}; {len(generated)} generated for macOS")
    return 0


if __name__ == "__main__":
    sys.exit(main())
