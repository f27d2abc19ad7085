"""The two programs: `pion-server` (also `python -m pion.cli`) and `pion`."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import logging
import os
import sys
from collections.abc import Sequence

from pion import __version__
from pion.attention.choice import explain
from pion.config import HelpRequested, Options, VersionRequested, help_text, parse_args
from pion.errors import NOT_IN_VERSION, PionError, StartupError, StorageError

_LEVELS = {"debug": logging.DEBUG, "verbose": logging.INFO, "notice": logging.INFO, "warning": logging.WARNING}

_M_ARENA_MAX = -8  # of malloc.h

_COMMANDS = ("server", "demo", "inspect", "check", "export", "import", "top", "bench")
_TOOLS = {  # they need no server of their own, and load none
    "check": "pion.tools.check:main",
    "inspect": "pion.tools.show:main",
    "export": "pion.tools.portability:export_main",
    "import": "pion.tools.portability:import_main",
}

_USAGE = """usage: pion <command> [arguments]

  server   the server; the same as pion-server
  check    compare every record of a data directory with its checksum
  inspect  print what is in a file of a data directory
  export   write a stored prefix to a file: mlx-lm's prompt cache, or the entry as it is
  import   store the prefix that is in such a file
  demo     cold, warm and after a kill: a real model on a stored prefix

top and bench come with later versions."""


def server_main(argv: Sequence[str] | None = None) -> int:
    """Runs the server until SIGTERM, SIGINT or SHUTDOWN.

    Returns:
        The exit status: 0 after a clean end, 1 when the server could not start or not write down what it held
        (`FATAL: ...` on stderr).
    """
    try:
        options = parse_args(sys.argv[1:] if argv is None else argv)
    except HelpRequested:
        print(help_text())
        return 0
    except VersionRequested:
        print(f"pion-server {__version__}")
        return 0
    except StartupError as error:
        return _fatal(error, "Run pion-server --help for the flags.")
    _configure(options)
    import trio

    from pion.net.server import serve

    print(f"{banner(options)}\n", end="", flush=True)
    try:
        trio.run(functools.partial(serve, options))
    except (StartupError, StorageError) as error:
        return _fatal(error)
    except BaseExceptionGroup as group:
        # The nursery of serve() wraps whatever ends it.
        known, rest = group.split((StartupError, StorageError))
        if known is None or rest is not None:
            raise
        return _fatal(_leaf(known))
    return 0


def _leaf(group: BaseExceptionGroup[PionError]) -> PionError:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, PionError)
    return error


def _fatal(error: PionError, hint: str = "") -> int:
    print(f"FATAL: {error}", file=sys.stderr)
    if hint:
        print(hint, file=sys.stderr)
    return 1


def _configure(options: Options) -> None:
    """Process-wide settings that only a program of its own may make."""
    logging.basicConfig(
        level=_LEVELS[options.loglevel], stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    if options.requirepass and not options.requirepass_file and "PION_REQUIREPASS" not in os.environ:
        logging.getLogger("pion").warning("--requirepass is visible in ps: --requirepass-file is not")
    _bound_heaps()
    # One busy Python handler must not keep the plane from the interpreter for the default 5 ms.
    sys.setswitchinterval(0.0005)


def _bound_heaps() -> None:
    """Two heaps for all threads. glibc gives each thread one of its own, and what is freed there is kept: under a mixed
    load the process grew by a third within minutes while what it used stayed the same."""
    if sys.platform != "linux" or "MALLOC_ARENA_MAX" in os.environ:
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries have none
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 2)


def banner(options: Options) -> str:
    """What the server says at its start: the configuration in force."""
    where = "memory only" if options.memory_only else os.path.abspath(options.dir)
    listen = [f"{address}:{options.port}" for address in options.bind] if options.port >= 0 else []
    rows = {
        "listen": ", ".join([*listen, options.unixsocket] if options.unixsocket else listen),
        "data": where,
        "log": f"appendfsync {options.appendfsync}" if options.wal else "off: the ordinary keyspace is not kept",
        "kv cache": _room(options) if options.kvcache else "off (--kvcache)",
        "attention": _attention(options),
        "login": "password" if options.requirepass else "none",
        "movers": str(options.workers),
    }
    width = max(map(len, rows))
    return "\n".join([f"pion-server {__version__}", *(f"  {name:<{width}}  {value}" for name, value in rows.items())])


def _room(options: Options) -> str:
    """How many prefixes fit: each is a session for K and one for V."""
    sessions = options.max_sessions
    return f"on, at most {sessions // 2} prefixes (--max-sessions {sessions}; K and V of a prefix count as two)"


def _attention(options: Options) -> str:
    metal = options.metal_attention or options.metal_attention_fp16
    words = explain(options.attention_mode, metal, options.metal_attention_fp16, options.fa_window)
    return words if options.attention_mode != "off" or options.attention else f"{words} (--kvcache)"


def main(argv: Sequence[str] | None = None) -> int:
    """The `pion` command."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        print(_USAGE)
        return 0
    command, rest = words[0], words[1:]
    if command in ("-v", "--version", "version"):
        print(f"pion {__version__}")
        return 0
    if command == "server":
        return server_main(rest)
    if command in _TOOLS:
        return _tool(command, rest)
    if command == "demo" and importlib.util.find_spec("pion.demo.runner") is not None:
        demo = importlib.import_module("pion.demo")
        return int(demo.main(rest))
    if command in _COMMANDS:
        print(f"pion {command} is {NOT_IN_VERSION}", file=sys.stderr)
    else:
        print(f"pion: unknown command '{command}'\n{_USAGE}", file=sys.stderr)
    return 2


def _tool(command: str, rest: Sequence[str]) -> int:
    module, _, function = _TOOLS[command].partition(":")
    try:
        status = int(getattr(importlib.import_module(module), function)(rest))
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, say `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 130
    return status


if __name__ == "__main__":
    sys.exit(main() if sys.argv[1:2] and sys.argv[1] in _COMMANDS else server_main())
