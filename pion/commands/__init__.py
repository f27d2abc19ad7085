"""The commands: one declarative table, one module a family. Importing the package registers every family."""

from pion.commands import (
    attend,
    client,
    config_cmd,
    connection,
    export,
    hashes,
    info,
    introspect,
    keys,
    lane,
    prefix,
    prefix_keep,
    prefix_match,
    server,
    ssm,
    stats,
    strings,
    vcommands,
    zranges,
    zsets,
)
from pion.commands.dispatch import Dispatcher
from pion.commands.state import ServerState

__all__ = [
    "Dispatcher", "ServerState",
    "attend", "client", "config_cmd", "connection", "export", "hashes", "info", "introspect", "keys", "lane", "prefix",
    "prefix_keep", "prefix_match", "server", "ssm", "stats", "strings", "vcommands", "zranges", "zsets",
]  # fmt: skip
