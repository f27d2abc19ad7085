"""COMMAND: the table, told to clients."""

from __future__ import annotations

from typing import Any

from pion import errors
from pion.commands import args, table, usage
from pion.commands.dispatch import Context
from pion.commands.table import COMMANDS, Command, command
from pion.errors import CommandError
from pion.wire.resp import Raw, Simple, encode

_FLAGS = "loading stale"
_USAGE = usage.lines()


def _ordered_set(items: list[Any], proto: int) -> Raw:
    """A RESP3 set (RESP2: array) in a fixed order."""
    head = b"~%d\r\n" if proto == 3 else b"*%d\r\n"
    return Raw(head % len(items) + b"".join(encode(item, proto) for item in items))


def _names(words: list[str], proto: int) -> Raw:
    return _ordered_set([Simple(word.encode()) for word in words], proto)


def _categories(record: Command) -> list[str]:
    return [f"@{name}" for name in sorted(record.acl)]


def _key_specs(record: Command, proto: int) -> Raw:
    if record.first == 0:
        return _ordered_set([], proto)
    parts = record.keys.split(";")
    last = record.last - record.first if record.last >= 0 else record.last
    specs = [
        {
            "flags": _names(flags.split(), proto),
            "begin_search": {"type": "index", "spec": {"index": record.first + i * record.step}},
            "find_keys": {
                "type": "range",
                "spec": {"lastkey": last if len(parts) == 1 else 0, "keystep": record.step, "limit": 0},
            },
        }
        for i, flags in enumerate(parts)
    ]
    return _ordered_set(specs, proto)


def describe(record: Command, proto: int) -> list[Any]:
    """One element of COMMAND INFO."""
    return [
        record.name,
        record.arity,
        _names(record.ordered_flags(), proto),
        record.first,
        record.last,
        record.step,
        _names(_categories(record), proto),
        _ordered_set([], proto),
        _key_specs(record, proto),
        _ordered_set([describe(sub, proto) for sub in record.subcommands.values()], proto),
    ]


def _argument(node: usage.Argument, proto: int) -> dict[str, Any]:
    """One argument of COMMAND DOCS; the order of fields is Redis's."""
    out: dict[str, Any] = {"name": node["name"], "type": node["type"]}
    if node["type"] == "key":
        out["key_spec_index"] = 1 if node["name"] == "newkey" else 0
    if "token" in node:
        out["token"] = node["token"]
    if node.get("flags"):
        out["flags"] = _names(node["flags"], proto)
    if "arguments" in node:
        out["arguments"] = [_argument(inner, proto) for inner in node["arguments"]]
    return out


def document(record: Command, proto: int) -> dict[str, Any]:
    """One value of COMMAND DOCS."""
    out: dict[str, Any] = {
        "summary": record.summary,
        "since": record.since,
        "group": record.group,
        "complexity": record.complexity,
    }
    text = _USAGE.get(record.name)
    if text is not None:
        out["arguments"] = [_argument(node, proto) for node in usage.arguments(text)]
    if record.subcommands:
        out["subcommands"] = {sub.name: document(sub, proto) for sub in record.subcommands.values()}
    return out


def find_by_name(raw: bytes) -> Command | None:
    """The record named `get` or `client|id`."""
    container, _, sub = bytes(raw).lower().partition(b"|")
    record = COMMANDS.get(container)
    return record.subcommands.get(sub) if record is not None and sub else record


@command("COMMAND", -1, _FLAGS, 0, 0, 0, "server", "2.8.13", "Describes every command.",
         "O(N) where N is the number of commands", acl="connection")  # fmt: skip
def command_(ctx: Context, _argv: list[bytes]) -> Any:
    return [describe(record, ctx.conn.proto) for record in COMMANDS.values()]


@command("COMMAND|COUNT", 2, _FLAGS, 0, 0, 0, "server", "2.8.13", "The number of commands.", "O(1)", acl="connection")
def command_count(_ctx: Context, _argv: list[bytes]) -> Any:
    return len(COMMANDS)


@command("COMMAND|INFO", -2, _FLAGS, 0, 0, 0, "server", "2.8.13", "Describes the named commands, or all.",
         "O(N) where N is the number of names", acl="connection")  # fmt: skip
def command_info(ctx: Context, argv: list[bytes]) -> Any:
    if len(argv) == 2:
        return command_(ctx, argv)
    found = [find_by_name(raw) for raw in argv[2:]]
    return [describe(record, ctx.conn.proto) if record is not None else None for record in found]


@command("COMMAND|DOCS", -2, _FLAGS, 0, 0, 0, "server", "7.0.0", "Documents the named commands, or all.",
         "O(N) where N is the number of names", acl="connection")  # fmt: skip
def command_docs(ctx: Context, argv: list[bytes]) -> Any:
    chosen = [find_by_name(raw) for raw in argv[2:]] if len(argv) > 2 else list(COMMANDS.values())
    return {record.name: document(record, ctx.conn.proto) for record in chosen if record is not None}


@command("COMMAND|LIST", -2, _FLAGS, 0, 0, 0, "server", "7.0.0", "The names of the commands, filtered on demand.",
         "O(N) where N is the number of commands", acl="connection")  # fmt: skip
def command_list(_ctx: Context, argv: list[bytes]) -> Any:
    everything = list(table.walk())
    if len(argv) == 2:
        return [record.name for record in COMMANDS.values()]
    if len(argv) != 5 or args.upper(argv[2]) != b"FILTERBY":
        raise CommandError(errors.SYNTAX)
    kind, value = args.upper(argv[3]), argv[4]
    if kind == b"MODULE":
        return []
    if kind == b"ACLCAT":
        category = args.text(value).lower().removeprefix("@")
        return [record.name for record in everything if category in record.acl]
    if kind == b"PATTERN":
        matches = args.compile_glob(value, nocase=True).fullmatch
        return [record.name for record in everything if matches(record.name.encode())]
    raise CommandError(errors.SYNTAX)


def _keys_of(argv: list[bytes]) -> tuple[Command, list[bytes]]:
    inner = argv[2:]
    try:
        record = table.find(inner)
    except CommandError as error:
        bad_arity = "wrong number" in str(error)
        text = "ERR Invalid number of arguments specified for command" if bad_arity else "ERR Invalid command specified"
        raise CommandError(text) from None
    if record.first == 0:
        raise CommandError("ERR The command has no key arguments")
    return record, [inner[i] for i in record.key_positions(len(inner))]


@command("COMMAND|GETKEYS", -4, _FLAGS, 0, 0, 0, "server", "2.8.13", "The keys among the arguments of a command.",
         "O(N) where N is the number of arguments", acl="connection")  # fmt: skip
def command_getkeys(_ctx: Context, argv: list[bytes]) -> Any:
    return _keys_of(argv)[1]


@command("COMMAND|GETKEYSANDFLAGS", -4, _FLAGS, 0, 0, 0, "server", "7.0.0",
         "The keys among the arguments of a command, with what it does to them.",
         "O(N) where N is the number of arguments", acl="connection")  # fmt: skip
def command_getkeysandflags(ctx: Context, argv: list[bytes]) -> Any:
    record, found = _keys_of(argv)
    specs = record.keys.split(";")
    return [[key, _names(specs[min(i, len(specs) - 1)].split(), ctx.conn.proto)] for i, key in enumerate(found)]


table.container("ACL", "server", "6.0.0", "Commands about users and their rights.")


@command("ACL|WHOAMI", 2, "noscript loading stale", 0, 0, 0, "server", "6.0.0", "The user of this connection.", "O(1)")
def acl_whoami(ctx: Context, _argv: list[bytes]) -> Any:
    return ctx.conn.user.name


@command("ACL|CAT", -2, "noscript loading stale", 0, 0, 0, "server", "6.0.0",
         "The categories, or the commands of one.", "O(1)")  # fmt: skip
def acl_cat(_ctx: Context, argv: list[bytes]) -> Any:
    if len(argv) > 3:
        raise errors.bad_subcommand("ACL", "CAT")
    if len(argv) == 2:
        return sorted({category for record in table.walk() for category in record.acl})
    category = args.text(argv[2]).lower()
    found = [record.name for record in table.walk() if category in record.acl]
    if not found:
        raise CommandError(f"ERR Unknown category '{args.text(argv[2])}'")
    return found


@command("ACL|USERS", 2, "admin noscript loading stale", 0, 0, 0, "server", "6.0.0", "The names of the users.", "O(1)")
def acl_users(ctx: Context, _argv: list[bytes]) -> Any:
    return [ctx.auth.default.name]
