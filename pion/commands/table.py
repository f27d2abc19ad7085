"""The declarative command table: one record per command; COMMAND, COMMAND DOCS, HELP and ACL categories come from it.

A family module registers its handlers at import:

    @command("GET", 2, "readonly fast", 1, 1, 1, "string", "1.0.0", "Returns the string value of a key.", "O(1)",
             keys="RO access", fast="GET")
    def get(ctx, argv): ...

`argv` is the whole command, name included. A handler returns a reply value (see `pion.wire.resp`) or is a coroutine
function. Field names are those of Valkey's command JSON files, so that users of COMMAND DOCS meet what they know.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from pion import errors

Handler = Callable[..., Any]
OpenStream = Callable[..., Any]

# Flags in the order Redis lists them.
FLAG_ORDER = (
    "write", "readonly", "denyoom", "module", "admin", "pubsub", "noscript", "random", "blocking", "loading", "stale",
    "skip_monitor", "skip_slowlog", "asking", "fast", "no_auth", "may_replicate", "no_async_loading", "no_multi",
    "movablekeys", "allow_busy",
)  # fmt: skip

_GROUP_CATEGORY = {
    "string": "string",
    "generic": "keyspace",
    "hash": "hash",
    "sorted-set": "sortedset",
    "connection": "connection",
}


# Writes of these groups go to the log of the ordinary keyspace.
_LOGGED_GROUPS = frozenset({"string", "generic", "hash", "sorted-set", "server"})


@dataclass(eq=False, slots=True)
class Command:
    """One command or subcommand.

    Attributes:
        name: lower case, `client|id` for a subcommand.
        arity: as in Redis: exact when positive, minimum when negative, the name included.
        flags: names of `FLAG_ORDER`.
        first, last, step: key positions in argv; `first` 0 = no keys, `last` negative counts from the end.
        keys: flags of the key spec (`RO access`, `RW update`, ...), empty when there are no keys; several specs of one
            key each are separated by `;`.
        fast: suffix of the plane's constant (`GET` -> `plane.FAST_GET`) when the plane also has this command in C.
        stream_arg: argv index of the argument that may be received straight into a file, or None.
        logged: True for a write to the ordinary keyspace, which is refused while its log cannot be written.
        open_stream: `(ctx, argv_so_far, nbytes) -> Sink`, set by the family that owns the command.
    """

    name: str
    handler: Handler
    arity: int
    flags: frozenset[str]
    first: int
    last: int
    step: int
    group: str
    since: str
    summary: str
    complexity: str
    keys: str = ""
    acl: frozenset[str] = frozenset()
    fast: str | None = None
    stream_arg: int | None = None
    open_stream: OpenStream | None = None
    subcommands: dict[bytes, Command] = field(default_factory=dict)
    write: bool = False
    denyoom: bool = False
    logged: bool = False
    no_auth: bool = False

    def arity_ok(self, argc: int) -> bool:
        """True when a command of `argc` arguments, the name included, is complete."""
        return argc == self.arity if self.arity >= 0 else argc >= -self.arity

    def key_positions(self, argc: int) -> range:
        """Indices of the keys in a command of `argc` arguments."""
        if self.first == 0:
            return range(0)
        last = self.last if self.last >= 0 else argc + self.last
        return range(self.first, last + 1, self.step)

    def ordered_flags(self) -> list[str]:
        """The flags as COMMAND INFO lists them."""
        return [flag for flag in FLAG_ORDER if flag in self.flags]


#: Every top-level command by its lower-case name.
COMMANDS: dict[bytes, Command] = {}


def command(
    name: str,
    arity: int,
    flags: str,
    first: int,
    last: int,
    step: int,
    group: str,
    since: str,
    summary: str,
    complexity: str,
    *,
    keys: str = "",
    acl: str = "",
    fast: str | None = None,
    stream_arg: int | None = None,
) -> Callable[[Handler], Handler]:
    """Registers the decorated handler under `name` (`GET`, or `CLIENT|ID` for a subcommand).

    Args:
        acl: further ACL categories, without `@`; those that follow from flags and group are added by themselves.

    Raises:
        ValueError: at import, for a duplicate name, an unknown flag or a subcommand without its container.
    """

    def register(handler: Handler) -> Handler:
        add(
            Command(
                name.lower(), handler, arity, frozenset(flags.split()), first, last, step, group, since, summary,
                complexity, keys, frozenset(acl.split()), fast, stream_arg,
            )
        )  # fmt: skip
        return handler

    return register


def add(record: Command) -> None:
    """Puts one record into the table; see `command`."""
    unknown = record.flags - set(FLAG_ORDER)
    if unknown:
        raise ValueError(f"{record.name}: unknown flags {sorted(unknown)}")
    record.write = "write" in record.flags
    record.denyoom = "denyoom" in record.flags
    record.no_auth = "no_auth" in record.flags
    record.logged = record.write and record.group in _LOGGED_GROUPS
    record.acl = record.acl | _implied_categories(record)
    container, _, sub = record.name.partition("|")
    home = COMMANDS[container.encode()].subcommands if sub else COMMANDS
    key = (sub or container).encode()
    if key in home:
        raise ValueError(f"{record.name} is registered twice")
    home[key] = record


def container(name: str, group: str, since: str, summary: str) -> None:
    """Registers a command that exists only through its subcommands (CLIENT, CONFIG, ...)."""

    add(Command(name.lower(), _bare, -2, frozenset(), 0, 0, 0, group, since, summary, "Depends on subcommand."))


def _bare(_ctx: Any, argv: list[bytes]) -> Any:
    """The handler of a container; `find` refuses an unknown subcommand before."""
    raise errors.unknown_subcommand(argv[0].decode("latin-1"), argv[1])


def find(argv: list[bytes]) -> Command:
    """The record for a command as it arrived.

    Raises:
        CommandError: unknown command, unknown subcommand or wrong number of arguments, in Redis 7's words.
    """
    record = COMMANDS.get(argv[0]) or COMMANDS.get(argv[0].lower())
    if record is None:
        raise errors.unknown_command(argv)
    if record.subcommands and len(argv) > 1:
        sub = record.subcommands.get(argv[1].lower())
        if sub is None:
            if argv[1].lower() == b"help":
                return _HELP
            raise errors.unknown_subcommand(record.name, argv[1])
        record = sub
    if not record.arity_ok(len(argv)):
        raise errors.wrong_arity(record.name)
    return record


def walk() -> Iterator[Command]:
    """Every command and every subcommand."""
    for record in COMMANDS.values():
        yield record
        yield from record.subcommands.values()


def fast_commands() -> list[Command]:
    """The records the plane also runs in C."""
    return [record for record in COMMANDS.values() if record.fast is not None]


def help_lines(record: Command) -> list[str]:
    """What `<CONTAINER> HELP` answers."""
    lines = [f"{record.name.upper()} <subcommand> [<arg> [value] [opt] ...]. Subcommands are:"]
    for sub, item in sorted(record.subcommands.items()):
        lines += [sub.decode().upper(), f"    {item.summary}"]
    return [*lines, "HELP", "    Print this help."]


def _implied_categories(record: Command) -> frozenset[str]:
    """The ACL categories Redis derives from flags and group."""
    flags = record.flags
    out = {"fast" if "fast" in flags else "slow"}
    out |= {
        name for flag, name in (("write", "write"), ("readonly", "read"), ("blocking", "blocking")) if flag in flags
    }
    if "admin" in flags:
        out |= {"admin", "dangerous"}
    if "pubsub" in flags:
        out.add("pubsub")
    if record.group in _GROUP_CATEGORY and record.handler is not _bare:
        out.add(_GROUP_CATEGORY[record.group])
    return frozenset(out)


def _help(_ctx: Any, argv: list[bytes]) -> Any:
    from pion.wire.resp import Simple

    return [Simple(line.encode()) for line in help_lines(COMMANDS[argv[0].lower()])]


_HELP = Command(
    "help", _help, -2, frozenset({"loading", "stale"}), 0, 0, 0, "server", "5.0.0", "Returns helpful text.", "O(1)"
)
