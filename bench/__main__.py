"""`python -m bench [--only name,name] [--list]`."""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import sys

import bench
from bench import harness

INFRASTRUCTURE = {"harness", "peers", "gemma3", "__main__"}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description=bench.__doc__)
    parser.add_argument("--only", default="", help="names of results, with commas between them")
    parser.add_argument("--list", action="store_true", help="print the names and stop")
    options = parser.parse_args()
    for module in pkgutil.iter_modules(bench.__path__):
        if module.name not in INFRASTRUCTURE and not module.name.startswith("quality"):
            importlib.import_module(f"bench.{module.name}")
    if options.list:
        print("\n".join(sorted(harness.REGISTRY)))
        return 0
    return harness.run([name for name in options.only.split(",") if name])


if __name__ == "__main__":
    sys.exit(main())
