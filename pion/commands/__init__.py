"""The commands: one declarative table, one module a family. Importing the package registers every family."""

from pion.commands import (
    client,
    config_cmd,
    connection,
    hashes,
    info,
    introspect,
    keys,
    prefix,
    server,
    ssm,
    stats,
    strings,
    vcommands,
)

__all__ = [
    "client", "config_cmd", "connection", "hashes", "info", "introspect", "keys", "prefix", "server", "ssm", "stats",
    "strings", "vcommands",
]  # fmt: skip
