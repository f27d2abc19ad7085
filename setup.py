"""Build of the compiled core. Everything else about the package is in pyproject.toml.

PION_ONLY=quant,resp   build these core modules only (development)
PION_CHECKS=1          bounds, wraparound and overflow checks on
"""

import os
import sys
from pathlib import Path

from Cython.Build import cythonize
from setuptools import Extension, setup

CORE = Path("pion/_core")
CHECKS = os.environ.get("PION_CHECKS") == "1"
only = {name for name in os.environ.get("PION_ONLY", "").split(",") if name}

args = ["-O3", "-std=gnu11", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off", "-Wall", "-Wno-unused-function"]
if sys.platform == "linux":
    args.append("-D_GNU_SOURCE")
headers = sorted(str(path) for path in CORE.glob("*.h"))

extensions = [
    Extension(f"pion._core.{path.stem}", [str(path)], depends=headers, extra_compile_args=args, libraries=["pthread"])
    for path in sorted(CORE.glob("*.pyx"))
    if not only or path.stem in only
]
shared = Extension("pion._core._cyutility", sources=["pion/_core/_cyutility.c"], extra_compile_args=args)
directives = {"boundscheck": True, "wraparound": True, "initializedcheck": True, "cdivision": False} if CHECKS else {}

setup(
    ext_modules=cythonize(
        [*extensions, shared],
        shared_utility_qualified_name="pion._core._cyutility",
        compiler_directives={"binding": True, "embedsignature": True, **directives},
    )
    if extensions
    else [],
)
