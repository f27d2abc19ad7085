"""`pion demo`: a real model answers from a prefix that another process computed.

``blas``      a fast matrix product for mlx's CPU wheel on Linux
``smollm2``   SmolLM2-135M-Instruct from a PyPI wheel, no model hub
``prompt``    the system prompt and the questions
``worker``    one client process: load the model, get the prefix, answer
``runner``    the play in three acts: cold, warm, warm after SIGKILL

Nothing here is imported by the server or the client library.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; see ``pion.demo.runner.main``."""
    from pion.demo.runner import main as run

    return run(argv)
