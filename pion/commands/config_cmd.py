"""CONFIG: the options by Redis's names."""

from __future__ import annotations

import logging
import os
from typing import Any

from pion import errors
from pion.commands import args
from pion.commands.dispatch import Context
from pion.commands.table import command, container
from pion.errors import CommandError
from pion.wire.resp import OK

container("CONFIG", "server", "2.0.0", "Commands about the server's options.")

_FLAGS = "admin noscript loading stale"
_LEVELS = {"debug": logging.DEBUG, "verbose": logging.INFO, "notice": logging.INFO, "warning": logging.WARNING}


@command("CONFIG|GET", -3, _FLAGS, 0, 0, 0, "server", "2.0.0", "Options whose names match a pattern.",
         "O(N) where N is the number of patterns")  # fmt: skip
def config_get(ctx: Context, argv: list[bytes]) -> Any:
    known = ctx.options.parameters() | _running(ctx)
    out: dict[str, str] = {}
    for raw in argv[2:]:
        name = args.text(raw)
        if name.lower() in known:
            out[name] = known[name.lower()]  # Redis answers an exact name as it was asked
            continue
        matches = args.compile_glob(raw, nocase=True).fullmatch
        out.update({name: value for name, value in known.items() if matches(name.encode())})
    return out


def _running(ctx: Context) -> dict[str, str]:
    """Options that a default or the system decided at start, with what was decided."""
    options, attention = ctx.options, ctx.server.attention
    out = {
        "max-bytes": str(ctx.engine.info()["vstore_max_bytes"]),
        "attention": attention.mode,
        "attend-max-bytes": str(attention.max_bytes),
        "binary-port": str(ctx.server.binary.port or "off"),
    }
    if ctx.server.port:
        out["port"] = str(ctx.server.port)
    if options.dir and not options.memory_only:
        out["dir"] = os.path.abspath(options.dir)
    return out


@command("CONFIG|SET", -4, _FLAGS, 0, 0, 0, "server", "2.0.0", "Changes options, all of them or none.",
         "O(N) where N is the number of options")  # fmt: skip
def config_set(ctx: Context, argv: list[bytes]) -> Any:
    if len(argv) % 2:
        raise errors.wrong_arity("config|set")
    changes: dict[str, Any] = {}
    seen: set[str] = set()
    for raw_name, raw in zip(argv[2::2], argv[3::2], strict=True):
        name = args.text(raw_name).lower()
        if name in seen:
            raise _failed(raw_name, "duplicate parameter")
        seen.add(name)
        if _running(ctx).get(name) == args.text(raw):
            continue
        try:
            field, value = ctx.options.parse_parameter(name, args.text(raw))
        except KeyError:
            raise CommandError(errors.CONFIG_UNKNOWN.format(name=args.text(raw_name))) from None
        except ValueError as error:
            raise _failed(raw_name, str(error)) from None
        if field:
            changes[field] = value
    for field, value in changes.items():
        setattr(ctx.options, field, value)
    _apply(ctx, changes)
    return OK


def _failed(name: bytes, reason: str) -> CommandError:
    return CommandError(errors.CONFIG_FAILED.format(name=args.text(name), reason=reason))


def _apply(ctx: Context, changes: dict[str, Any]) -> None:
    state = ctx.server
    if "maxmemory" in changes or "maxmemory_policy" in changes:
        state.bound_memory(ctx.options.maxmemory, ctx.options.maxmemory_policy)
    if "maxclients" in changes:
        state.maxclients = changes["maxclients"]
    if "requirepass" in changes:
        ctx.auth.set_password(changes["requirepass"])
    if "slowlog_log_slower_than" in changes:
        state.slowlog.threshold_us = changes["slowlog_log_slower_than"]
        state.choose_door()
    if "slowlog_max_len" in changes:
        state.slowlog.max_len = changes["slowlog_max_len"]
    if "loglevel" in changes:
        logging.getLogger("pion").setLevel(_LEVELS[changes["loglevel"]])
    if "appendfsync" in changes:
        ctx.engine.set_appendfsync(changes["appendfsync"])


@command("CONFIG|RESETSTAT", 2, _FLAGS, 0, 0, 0, "server", "2.0.0", "Zeroes the counters of INFO.", "O(1)")
def config_resetstat(ctx: Context, _argv: list[bytes]) -> Any:
    ctx.server.reset_stats()
    return OK


@command("CONFIG|REWRITE", 2, _FLAGS, 0, 0, 0, "server", "2.8.0", "Writes the options to the file they came from.",
         "O(1)")  # fmt: skip
def config_rewrite(_ctx: Context, _argv: list[bytes]) -> Any:
    raise CommandError("ERR The server is running without a config file")
