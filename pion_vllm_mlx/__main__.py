"""The console script ``pion-vllm-mlx``: says what this version has."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from pion_vllm_mlx import __version__

_HELP = f"""pion-vllm-mlx {__version__} (pion-server)

  PionPromptCache    in this version:  from pion_vllm_mlx import PionPromptCache
  attention patch    in this version:  from pion_vllm_mlx import install_pion_attention_patch
  serve              not in this version
  demo               run: pion demo

  -h, --help         this text
  -V, --version      the version
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Answer ``--help`` and ``--version``; commands that are not here yet, or never were, exit with 2."""
    args = list(sys.argv[1:] if argv is None else argv)
    command = args[0] if args else "help"
    if command in ("-h", "--help", "help"):
        sys.stdout.write(_HELP)
        return 0
    if command in ("-V", "--version"):
        print(f"pion-vllm-mlx {__version__}")
        return 0
    what = "is not in this version" if command == "serve" else "is no command of pion-vllm-mlx"
    print(f"pion-vllm-mlx: {command!r} {what}; see --help", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
