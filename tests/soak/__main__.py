"""`python -m tests.soak [--minutes N]`: a mixed load with kills on a real server; 1 when anything was wrong."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from tests.soak.run import soak


def main() -> int:
    """Parse the command line, run, print the figures."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=20.0, help="how long the clients work (default 20)")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 1_000_000, help="of everybody's choices")
    parser.add_argument("--dir", type=Path, help="for the server's data, kept afterwards")
    args = parser.parse_args()
    print(f"a soak of {args.minutes:g} minutes with seed {args.seed}", flush=True)
    report = soak(args.minutes * 60, args.seed, args.dir, lambda line: print(line, flush=True))
    print(report.text())
    return 1 if report.violations else 0


if __name__ == "__main__":
    sys.exit(main())
