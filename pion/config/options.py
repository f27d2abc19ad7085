"""The option table: the fields of `Options`, and the flags of the original that are not here yet."""

from __future__ import annotations

import dataclasses
import ipaddress
import os
import re
from collections.abc import Callable, Mapping
from typing import Any

from pion import limits
from pion.errors import NOT_IN_VERSION, StartupError

_UNITS = {
    "": 1, "b": 1, "k": 1000, "kb": 1 << 10, "m": 1000**2, "mb": 1 << 20, "g": 1000**3, "gb": 1 << 30,
    "t": 1000**4, "tb": 1 << 40,
}  # fmt: skip


def parse_size(text: str, percent: bool = False) -> int:
    """Bytes from `100`, `64k` (1000), `64kb` (1024), ... and with `percent` also `50%` of the machine's memory.

    Raises:
        ValueError: no memory value.
    """
    if percent and re.fullmatch(r"\d{1,3}%", text):
        return total_memory() * int(text[:-1]) // 100
    match = re.fullmatch(r"(\d+)([a-z]*)", text.lower())
    if match is None or match[2] not in _UNITS:
        raise ValueError("argument must be a memory value")
    return int(match[1]) * _UNITS[match[2]]


def total_memory() -> int:
    """Bytes of memory in this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _size(text: str) -> int:
    return parse_size(text)


def _memory(text: str) -> int:
    return parse_size(text, percent=True)


def _boolean(text: str) -> bool:
    if text.lower() not in ("yes", "no", "true", "false"):
        raise ValueError("argument must be 'yes' or 'no'")
    return text.lower() in ("yes", "true")


def _number(low: int, high: int, error: str = "") -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not re.fullmatch(r"-?\d{1,18}", text) or not low <= int(text) <= high:
            raise ValueError(error or f"argument must be between {low} and {high} inclusive")
        return int(text)

    return parse


def _choice(*allowed: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text.lower() not in allowed:
            raise ValueError(f"argument(s) must be one of the following: {', '.join(allowed)}")
        return text.lower()

    return parse


def _binary_port(text: str) -> int:
    if text.lower() == "off":
        return -1
    return _number(0, 65535, "argument must be a port, 0 for any free one, or off")(text)


def _addresses(text: str) -> tuple[str, ...]:
    out = []
    for word in text.replace(",", " ").split():
        address = {"localhost": "127.0.0.1", "*": "0.0.0.0"}.get(word, word.removeprefix("-"))
        try:
            ipaddress.ip_address(address)
        except ValueError:
            raise StartupError(f"--bind '{word}' is not a valid IP address.") from None
        out.append(address)
    if not out:
        raise StartupError(f"--bind '{text}' is not a valid IP address.")
    return tuple(out)


def parse_password(text: str) -> str:
    if len(text.encode("utf-8", "surrogateescape")) > limits.PASSWORD_MAX:
        raise ValueError(f"password too long (max {limits.PASSWORD_MAX} bytes)")
    return text


def _profile(text: str) -> str:
    if text not in ("kv", "vector", "ai", "full"):
        raise StartupError(f"invalid --profile (expected kv|vector|ai|full): {text}")
    if text in ("vector", "ai"):
        raise StartupError(f"--profile {text} is {NOT_IN_VERSION}: vector search and AI commands come later")
    return text


def config_text(value: Any) -> str:
    """A value as redis.conf and CONFIG GET write it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return " ".join(value)
    return "" if value is None else str(value)


def option(
    default: Any,
    group: str,
    text: str,
    parse: Callable[[str], Any] = str,
    *,
    flag: str | None = "",
    short: str | None = None,
    metavar: str = "N",
    redis: str | None = None,
    switch: bool | None = None,
    show: Callable[[Any], str] | None = None,
) -> Any:
    """One row of the table.

    Args:
        default: value when nothing is given.
        group: heading in `--help`.
        text: one line for `--help`.
        parse: text to value; ValueError or StartupError refuse it.
        flag: long flag without dashes; "" = the field's name with dashes; None = only in files and CONFIG.
        redis: name in redis.conf and CONFIG, when there is one.
        switch: a flag without a value, which sets the field to this.
        show: value to the text of CONFIG GET, where that is not `config_text`.
    """
    meta = {
        "group": group, "text": text, "parse": parse, "flag": flag, "short": short, "metavar": metavar,
        "redis": redis, "switch": switch, "show": show or config_text,
    }  # fmt: skip
    return dataclasses.field(default=default, metadata=meta)


@dataclasses.dataclass(slots=True)
class Options:
    """Everything the server can be told. Sizes are bytes, times as named; see `option` for what a row says."""

    port: int = option(
        limits.DEFAULT_PORT, "Server", "TCP port; 0 picks a free one, -1 opens none",
        _number(-1, 65535, "invalid port"), short="p", redis="port",
    )  # fmt: skip
    bind: tuple[str, ...] = option(
        ("127.0.0.1",), "Server", "address to listen on, several with commas", _addresses, metavar="ADDR", redis="bind"
    )
    unixsocket: str = option("", "Server", "also listen on this Unix socket", metavar="PATH", redis="unixsocket")
    unixsocketperm: int = option(
        0o700, "Server", "mode of the Unix socket, octal", lambda text: int(text, 8), flag=None,
        redis="unixsocketperm", show="{:o}".format,
    )  # fmt: skip
    workers: int = option(
        limits.DEFAULT_WORKERS, "Server", "threads that move bytes between sockets and files",
        _number(1, limits.MAX_WORKERS, "invalid worker count"), short="w",
    )  # fmt: skip
    maxclients: int = option(
        limits.DEFAULT_MAXCLIENTS, "Server", "connections at a time", _number(1, 1_000_000), redis="maxclients"
    )
    timeout: int = option(
        0, "Server", "seconds after which an idle connection is closed; 0 = never", _number(0, 1 << 31), flag=None,
        redis="timeout",
    )  # fmt: skip
    databases: int = option(
        limits.DATABASES, "Server", "numbered databases", _number(1, limits.DATABASES), flag=None, redis="databases"
    )
    profile: str = option("kv", "Server", "kv: what this version has", _profile, metavar="kv|full")
    kvcache: bool = option(False, "KV cache", "serve V.*, KV.PREFIX.*, SSM.PREFIX.*, ATTEND.*", _boolean, switch=True)
    lane: str = option(
        "", "KV cache", "Unix socket that hands files to local clients (default: in --dir)",
        metavar="PATH|off",
    )  # fmt: skip
    ns_prefix: str = option("", "KV cache", "every namespace must start with this", metavar="STR")
    max_sessions: int = option(
        limits.DEFAULT_MAX_SESSIONS, "KV cache", "sessions kept, two for a prefix (K, V); oldest use goes first",
        _number(1, 1 << 24),
    )  # fmt: skip
    max_bytes: int | None = option(
        None, "KV cache", "bytes of entry files kept (default: 80 % of the free disk at start)", _size, metavar="SIZE"
    )
    attention: str = option(
        "", "Attention", "auto, metal, mlx, cpu or off (default: auto with --kvcache)",
        _choice("auto", "metal", "mlx", "cpu", "off"), metavar="BACKEND",
    )  # fmt: skip
    metal_attention: bool = option(
        False, "Attention", "serve ATTEND.*, with Metal kernels where there is Metal", _boolean, switch=True
    )
    metal_attention_fp16: bool = option(
        False, "Attention", "the same, and hold K/V in half precision", _boolean, switch=True
    )
    fa_window: int = option(
        0, "Attention", "queries see so many positions at the end of a prefix; 0 = all", _number(0, 1 << 31)
    )
    attend_warm_slots: int = option(
        limits.ATTEND_WARM_SLOTS, "Attention", "layers whose K/V are in memory",
        _number(1, limits.ATTEND_MAX_SLOTS),
    )  # fmt: skip
    attend_cold_slots: int = option(
        limits.ATTEND_COLD_SLOTS, "Attention", "layers remembered after that", _number(0, limits.ATTEND_MAX_SLOTS)
    )
    attend_max_bytes: int | None = option(
        None, "Attention", "bytes of K/V in memory (default: 25 %)", _memory,
        metavar="SIZE|N%",
    )  # fmt: skip
    attend_autowarm: bool = option(
        False, "Attention", "a query of a cold layer reads it from its stored prefix", _boolean, switch=True
    )
    binary_port: int | None = option(
        None, "Attention", "TCP port of the binary lane (default: --port + 1)", _binary_port,
        metavar="N|off", show=lambda value: {None: "", -1: "off"}.get(value, str(value)),
    )  # fmt: skip
    dir: str = option("", "Data", "data directory (default: ./pion-<port>)", metavar="PATH", redis="dir")
    memory_only: bool = option(False, "Data", "keep everything in memory, no data directory", _boolean, switch=True)
    appendfsync: str = option(
        "everysec", "Data", "when keys and prefixes reach stable storage", _choice("everysec", "always", "no"),
        metavar="always|everysec|no", redis="appendfsync",
    )  # fmt: skip
    appendonly: bool = option(
        True, "Data", "do not log the ordinary keyspace: a restart begins with an empty one", _boolean, flag="no-wal",
        redis="appendonly", switch=False,
    )  # fmt: skip
    maxmemory: int = option(
        0, "Data", "bytes the ordinary keyspace may hold; 0 = no bound", _memory, metavar="SIZE|N%", redis="maxmemory"
    )
    maxmemory_policy: str = option(
        "noeviction", "Data", "if it is full: noeviction, allkeys-lru, volatile-lru, volatile-ttl",
        _choice("noeviction", "allkeys-lru", "volatile-lru", "volatile-ttl"), metavar="POLICY",
        redis="maxmemory-policy",
    )  # fmt: skip
    requirepass: str = option(
        "", "Security", "password (visible in ps)", parse_password, metavar="PW", redis="requirepass"
    )
    requirepass_file: str = option("", "Security", "file that holds the password", metavar="PATH")
    insecure_no_auth: bool = option(
        False, "Security", "allow a non-loopback --bind without a password", _boolean, switch=True
    )
    loglevel: str = option(
        "notice", "Diagnostics", "how much is logged", _choice("debug", "verbose", "notice", "warning"),
        metavar="LEVEL", redis="loglevel",
    )  # fmt: skip
    slowlog_log_slower_than: int = option(
        limits.SLOWLOG_SLOWER_THAN_US, "Diagnostics", "µs from which a command is slow", _number(-1, 1 << 62),
        flag=None, redis="slowlog-log-slower-than",
    )  # fmt: skip
    slowlog_max_len: int = option(
        limits.SLOWLOG_MAX_LEN, "Diagnostics", "slow commands kept", _number(0, 1 << 20), flag=None,
        redis="slowlog-max-len",
    )  # fmt: skip

    @property
    def wal(self) -> bool:
        """Whether the ordinary keyspace is logged."""
        return self.appendonly and not self.memory_only

    @property
    def attention_mode(self) -> str:
        """What computes attention: one of the words of `attention`, decided by the other flags when that is not set."""
        if self.attention:
            return self.attention
        return "auto" if self.kvcache or self.metal_attention or self.metal_attention_fp16 else "off"

    def parameters(self) -> dict[str, str]:
        """Every parameter CONFIG GET knows, by name, with its value as text; the password is not shown."""
        out = dict(FIXED)
        for name, field in FIELDS.items():
            value = getattr(self, name)
            if name.startswith("requirepass"):
                value = "(hidden)" if value else ""
            out[field.metadata["redis"] or name.replace("_", "-")] = field.metadata["show"](value)
        return out

    def parse_parameter(self, name: str, text: str) -> tuple[str, Any]:
        """Checks one CONFIG SET; returns (attribute, value) to be assigned, attribute "" = nothing to do.

        Raises:
            KeyError: no such parameter.
            ValueError: why it cannot be set.
        """
        if name in FIXED:
            if text.lower() != FIXED[name].lower():
                raise ValueError(f"only '{FIXED[name]}' is in this version")
            return "", None
        field = BY_NAME[name]
        if field.name not in MUTABLE:
            if field.metadata["show"](getattr(self, field.name)) == text.lower():
                return "", None
            raise ValueError("can't set immutable config")
        return field.name, field.metadata["parse"](text)


#: What CONFIG SET may change while the server runs.
MUTABLE = frozenset(
    {
        "maxmemory", "maxmemory_policy", "maxclients", "timeout", "requirepass", "slowlog_log_slower_than",
        "slowlog_max_len", "loglevel", "appendfsync",
    }
)  # fmt: skip

#: Parameters of Redis that have one value here: CONFIG GET tells it, any other value is refused.
FIXED: Mapping[str, str] = {
    "save": "",
    "proto-max-bulk-len": str(limits.MAX_BULK),
    "enable-debug-command": "no",
    "tls-port": "0",
    "cluster-enabled": "no",
    "daemonize": "no",
    "protected-mode": "yes",
    "tcp-keepalive": "300",
    "latency-monitor-threshold": "0",
    "notify-keyspace-events": "",
    "io-threads": "1",
    "lua-time-limit": "5000",
}


FIELDS: dict[str, dataclasses.Field[Any]] = {field.name: field for field in dataclasses.fields(Options)}


def flag_of(field: dataclasses.Field[Any]) -> str | None:
    """The long flag of a row with its dashes, None when there is none."""
    flag = field.metadata["flag"]
    return None if flag is None else "--" + (flag or field.name.replace("_", "-"))


BY_FLAG = {flag: field for field in FIELDS.values() if (flag := flag_of(field))} | {
    f"-{field.metadata['short']}": field for field in FIELDS.values() if field.metadata["short"]
}
BY_NAME = {name.replace("_", "-"): field for name, field in FIELDS.items()} | {
    field.metadata["redis"]: field for field in FIELDS.values() if field.metadata["redis"]
}

# Flags of the original that later versions bring; the value says whether the flag takes one.
LATER_FLAGS: Mapping[str, bool] = {
    "--io-threads": True, "--tenant": True, "--enable-debug-command": True, "--lua-time-limit": True,
    "--lua-memory-limit": True, "--huge-pages": False, "--no-huge-pages": False, "--affinity": False,
    "--no-affinity": False, "--wal-size": True, "--wal-max-segments": True, "--wal-full-policy": True,
    "--blob-threshold": True, "--no-blob-tier": False, "--crash-log": True, "--status-file": True,
    "--rss-warn-pct": True, "--epoll": False, "--iouring": False, "--sqpoll": False, "--xdp": False,
    "--xdp-iface": True, "--xdp-interface": True, "--dim": True, "--max-elements": True, "--polarquant": False,
    "--turboquant": False, "--nanoquant": False, "--gpu": False, "--cuda-attention": False,
    "--moe-cache": True, "--moe-cache-mib": True, "-G": False, "--ai-gateway": False, "-M": True,
    "--max-engine": True, "--flare": False, "--emb-enabled": False, "--emb-model": True, "--emb-host": True,
    "--emb-port": True, "--emb-dim": True, "--emb-query-prefix": True, "--emb-doc-prefix": True,
    "--llm-enabled": False, "--llm-port": True, "--llm-model": True, "--inference": False,
    "--inference-socket": True, "--inference-emb-model": True, "--inference-llm-model": True, "--auto-embed": False,
    "--nle-embed": False, "--cluster": False, "--cluster-host": True, "--cluster-nodes": True,
    "--cluster-replica": False, "--cluster-primary-host": True, "--cluster-primary-port": True,
    "--gossip-ping-ms": True, "--restore": True, "--tls-port": True,
}  # fmt: skip

# Flags of the original that switch off what is not here: nothing to do.
IDLE_FLAGS = frozenset({"--no-auto-detect", "--no-auto-embed", "--no-crash-log"})
