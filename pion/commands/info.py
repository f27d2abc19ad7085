"""INFO: Redis's sections and field names, so that its dashboards fill, plus `# Pion`."""

from __future__ import annotations

import os
import platform
import resource
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

from pion import __version__, limits
from pion.commands import stats as receipt
from pion.commands.connection import REDIS_VERSION, SERVER_NAME
from pion.commands.dispatch import Context
from pion.commands.table import command
from pion.wire.resp import Verbatim

_SHOWN = 8  # damaged files named in INFO; the log names all

Lines = Iterable[tuple[str, Any]]


def human(size: int) -> str:
    """Bytes as Redis abbreviates them: `1.50M`."""
    if size < 1024:
        return f"{size}B"
    value = float(size)
    for unit in "KMGTP":
        value /= 1024
        if value < 1024 or unit == "P":
            return f"{value:.2f}{unit}"
    return f"{size}B"


def _server(ctx: Context) -> Lines:
    state = ctx.server
    return [
        ("redis_version", REDIS_VERSION),
        ("server_name", SERVER_NAME),
        ("pion_version", f"{__version__}+core"),
        ("redis_mode", "standalone"),
        ("os", f"{platform.system()} {platform.release()} {platform.machine()}"),
        ("arch_bits", sys.maxsize.bit_length() + 1),
        ("multiplexing_api", "epoll" if sys.platform == "linux" else "kqueue"),
        ("process_id", os.getpid()),
        ("run_id", state.run_id),
        ("tcp_port", state.port),
        ("binary_port", state.binary.port),
        ("server_time_usec", time.time_ns() // 1000),
        ("uptime_in_seconds", state.uptime),
        ("uptime_in_days", state.uptime // 86_400),
        ("hz", 10),
        ("executable", os.path.realpath(sys.executable)),
        ("config_file", ""),
    ]


def _plane_stats(ctx: Context) -> dict[str, Any]:
    return dict(ctx.plane.stats) if ctx.plane is not None else {}


def _clients(ctx: Context) -> Lines:
    stats = _plane_stats(ctx)
    return [
        ("connected_clients", len(ctx.plane.connections) if ctx.plane is not None else 1),
        ("binary_clients", ctx.server.binary.clients),
        ("cluster_connections", 0),
        ("maxclients", ctx.server.maxclients),
        ("client_recent_max_input_buffer", stats.get("max_input", 0)),
        ("client_recent_max_output_buffer", stats.get("max_output", 0)),
        ("blocked_clients", 0),
        ("tracking_clients", 0),
    ]


def _memory(ctx: Context) -> Lines:
    state = ctx.server
    anonymous, resident = state.memory()
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return [
        ("used_memory", anonymous),
        ("used_memory_human", human(anonymous)),
        ("used_memory_rss", resident),
        ("used_memory_rss_human", human(resident)),
        ("used_memory_peak", state.peak_memory),
        ("used_memory_peak_human", human(state.peak_memory)),
        ("used_memory_dataset", state.data_bytes),
        ("total_system_memory", total),
        ("total_system_memory_human", human(total)),
        ("maxmemory", state.maxmemory),
        ("maxmemory_human", human(state.maxmemory)),
        ("maxmemory_policy", state.maxmemory_policy),
        ("maxmemory_refusing_writes", int(state.refusing_writes)),
        ("mem_fragmentation_ratio", f"{resident / max(anonymous, 1):.2f}"),
        ("mem_allocator", "libc"),
    ]


def _persistence(ctx: Context) -> Lines:
    state, store = ctx.server, ctx.engine.keyspace_store
    aside = ctx.engine.set_aside()
    return [
        ("loading", 0),
        ("async_loading", 0),
        ("rdb_changes_since_last_save", ctx.ks.dirty - state.saved_changes),
        ("rdb_bgsave_in_progress", int(state.saving)),
        ("rdb_last_save_time", state.last_save),
        ("rdb_last_bgsave_status", "ok" if state.last_save_ok else "err"),
        ("aof_enabled", int(store is not None)),
        ("aof_rewrite_in_progress", int(store is not None and store.rewriting)),
        ("aof_last_write_status", "err" if ctx.ks.refuses else "ok"),
        ("aof_current_size", store.log_bytes if store is not None else 0),
        ("set_aside_files", len(aside)),
        ("set_aside_last", ",".join(aside[-_SHOWN:])),
    ]


def _stats(ctx: Context) -> Lines:
    state, stats = ctx.server, _plane_stats(ctx)
    ops, kb_in, kb_out = state.rates()
    return [
        ("total_connections_received", stats.get("total_connections", 0)),
        ("total_commands_processed", state.total_commands()),
        ("instantaneous_ops_per_sec", ops),
        ("total_net_input_bytes", stats.get("net_in", 0)),
        ("total_net_output_bytes", stats.get("net_out", 0)),
        ("instantaneous_input_kbps", f"{kb_in:.2f}"),
        ("instantaneous_output_kbps", f"{kb_out:.2f}"),
        ("rejected_connections", stats.get("rejected", 0)),
        ("expired_keys", ctx.ks.expired),
        ("evicted_keys", ctx.ks.evicted),
        ("keyspace_hits", ctx.ks.hits),
        ("keyspace_misses", ctx.ks.misses),
        ("pubsub_channels", 0),
        ("pubsub_patterns", 0),
        ("total_error_replies", sum(state.error_counts.values())),
        ("slowlog_entries", len(state.slowlog)),
    ]


def _replication(ctx: Context) -> Lines:
    return [
        ("role", "master"),
        ("connected_slaves", 0),
        ("master_failover_state", "no-failover"),
        ("master_replid", ctx.server.run_id),
        ("master_repl_offset", 0),
        ("repl_backlog_active", 0),
        ("repl_backlog_size", 0),
    ]


def _cpu(_ctx: Context) -> Lines:
    own, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return [
        ("used_cpu_sys", f"{own.ru_stime:.6f}"),
        ("used_cpu_user", f"{own.ru_utime:.6f}"),
        ("used_cpu_sys_children", f"{children.ru_stime:.6f}"),
        ("used_cpu_user_children", f"{children.ru_utime:.6f}"),
    ]


def _commandstats(ctx: Context) -> Lines:
    for name, stats in sorted(ctx.server.command_stats().items()):
        yield (
            f"cmdstat_{name}",
            f"calls={stats.calls},usec={stats.usec},usec_per_call={stats.usec / max(stats.calls, 1):.2f},"
            f"rejected_calls={stats.rejected},failed_calls={stats.failed}",
        )


def _errorstats(ctx: Context) -> Lines:
    return [(f"errorstat_{code}", f"count={count}") for code, count in sorted(ctx.server.error_counts.items())]


def _cluster(_ctx: Context) -> Lines:
    return [("cluster_enabled", 0)]


def _keyspace(ctx: Context) -> Lines:
    for db in range(getattr(ctx.options, "databases", limits.DATABASES)):
        size = ctx.ks.size(db)
        if size:
            yield f"db{db}", f"keys={size},expires={ctx.ks.expires(db)},avg_ttl=0"


def _pion(ctx: Context) -> Lines:
    return receipt.info_lines(ctx.engine)


def _attention(ctx: Context) -> Lines:
    attention = ctx.server.attention
    return [*attention.settings().items(), *attention.described().items(), *ctx.server.binary.lines().items()]


_SECTIONS: dict[str, Callable[[Context], Lines]] = {
    "server": _server,
    "clients": _clients,
    "memory": _memory,
    "persistence": _persistence,
    "stats": _stats,
    "replication": _replication,
    "cpu": _cpu,
    "commandstats": _commandstats,
    "errorstats": _errorstats,
    "cluster": _cluster,
    "keyspace": _keyspace,
    "pion": _pion,
    "attention": _attention,
}
_TITLES = {"cpu": "CPU"}
_NOT_DEFAULT = frozenset({"commandstats"})


def sections(asked: Iterable[str]) -> list[str]:
    """The section names for the arguments of INFO, in fixed order; unknown names are ignored, as in Redis."""
    wanted: set[str] = set()
    for name in [word.lower() for word in asked] or ["default"]:
        if name in ("all", "everything"):
            wanted |= _SECTIONS.keys()
        elif name == "default":
            wanted |= _SECTIONS.keys() - _NOT_DEFAULT
        else:
            wanted.add(name)
    return [name for name in _SECTIONS if name in wanted]


def render(ctx: Context, names: Iterable[str]) -> str:
    """The text of INFO for these sections."""
    blocks = []
    for name in names:
        title = _TITLES.get(name, name.capitalize())
        blocks.append("".join([f"# {title}\r\n", *(f"{key}:{value}\r\n" for key, value in _SECTIONS[name](ctx))]))
    return "\r\n".join(blocks)


@command(
    "INFO", -1, "loading stale", 0, 0, 0, "server", "1.0.0", "Figures about the server, by section.", "O(1)",
    acl="dangerous",
)  # fmt: skip
def info(ctx: Context, argv: list[bytes]) -> Any:
    return Verbatim(render(ctx, sections(word.decode("utf-8", "replace") for word in argv[1:])))
