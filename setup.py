"""Build of the compiled core. Everything else about the package is in pyproject.toml.

PION_ONLY=quant,resp    build these core modules only
PION_NO_CORE=1          leave the core out: an editable install whose core `build_ext --inplace` then compiles once
PION_CHECKS=1           bounds and initialization checks on, whatever the files say; C asserts kept
PION_SANITIZE=address,undefined   instrument the C code (see CONTRIBUTING.md for how to run it)
"""

import importlib.util
import os
import re
import shutil
import sys
from pathlib import Path

from Cython.Build import cythonize
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
CORE = Path("pion/_core")
SHARED = "pion._core._cyutility"

CHECKS = os.environ.get("PION_CHECKS") == "1"
SANITIZE = os.environ.get("PION_SANITIZE", "")
ONLY = {name for name in os.environ.get("PION_ONLY", "").split(",") if name}

if sys.platform not in ("linux", "darwin"):
    sys.exit(f"Pion runs on Linux and macOS; this is {sys.platform}")

spec = importlib.util.spec_from_file_location("_sources", ROOT / CORE / "_sources.py")
assert spec is not None
assert spec.loader is not None
_sources = importlib.util.module_from_spec(spec)
spec.loader.exec_module(_sources)

# No fused multiply-add: every machine must write the same bytes.
COMPILE = ["-O3", "-std=gnu11", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off"]
COMPILE += ["-Wall", "-Wno-unused-function", "-Wno-sign-compare"]  # Cython compares int with size_t
LINK: list[str] = []
MACROS: list[tuple[str, str | None]] = [("_GNU_SOURCE", None)] if sys.platform == "linux" else []
if CHECKS:
    COMPILE += ["-UNDEBUG", "-O1"]
    MACROS.append(("PION_CHECKS", "1"))
if SANITIZE:
    # Copying no bytes from NULL is harmless on every platform, and defined since C2y.
    flags = ["-O1", "-g", "-fno-omit-frame-pointer", f"-fsanitize={SANITIZE}", "-fno-sanitize=nonnull-attribute"]
    COMPILE += flags
    LINK += flags


def checked_sources() -> Path:
    """A copy of the core with the checks turned on: a directive in a file outranks one given from outside."""
    copy = Path("build/checked") / CORE
    copy.mkdir(parents=True, exist_ok=True)
    shutil.copy("pion/__init__.py", copy.parent)
    for path in [*CORE.glob("*.py*"), *CORE.glob("*.pxd"), *CORE.glob("*.h")]:
        text = re.sub(r"(boundscheck|initializedcheck)(=|\()False", r"\1\2True", path.read_text(encoding="utf-8"))
        target = copy / path.name
        if not target.exists() or target.read_text(encoding="utf-8") != text:
            target.write_text(text, encoding="utf-8")
    return copy


class StampedBuild(build_ext):
    """build_ext that compiles on all cores and, in a source tree, notes which sources were built."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.parallel = self.parallel or min(os.cpu_count() or 1, 8)

    def run(self) -> None:
        super().run()
        if self.inplace:
            built = _sources.read_stamp(CORE)
            names = [ext.name.rpartition(".")[2] for ext in self.extensions if ext.name != SHARED]
            built |= {name: _sources.stamp_line(CORE, name) for name in names}
            kept = [built[name] for name in sorted(built) if (CORE / f"{name}.pyx").is_file()]
            (CORE / _sources.STAMP).write_text("".join(f"{line}\n" for line in kept), encoding="ascii")


folder = checked_sources() if CHECKS else CORE
modules = sorted(path.stem for path in CORE.glob("*.pyx") if not ONLY or path.stem in ONLY)
options = {"extra_compile_args": COMPILE, "extra_link_args": LINK, "define_macros": MACROS, "libraries": ["pthread"]}
extensions = [
    Extension(
        f"pion._core.{name}",
        [str(folder / f"{name}.pyx")],
        depends=[str(path) for path in _sources.sources(folder, name)],
        include_dirs=[str(CORE)],
        **options,
    )
    for name in modules
]
extensions.append(Extension(SHARED, [str(folder / "_cyutility.c")], **options))

compiled = (
    []
    if os.environ.get("PION_NO_CORE") == "1"
    else cythonize(
        extensions,
        quiet=bool({"-q", "--quiet"} & set(sys.argv)),  # of which file it is at; errors are printed all the same
        shared_utility_qualified_name=SHARED,
        include_path=["build/checked"] if CHECKS else [],
        compiler_directives={"binding": True, "embedsignature": True},
    )
)
setup(ext_modules=compiled, cmdclass={"build_ext": StampedBuild})
