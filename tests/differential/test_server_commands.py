"""Connection and server commands, word for word against redis-server, and the metadata of the whole table."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import Any

import pytest

from pion import testing
from pion.commands import table
from tests.support.redis_peer import redis_server
from tests.support.replies import Items, Simple, SocketClient

pytestmark = pytest.mark.compat

# One line a command, in one session on each server, so that later lines see what earlier ones did. A backslash escape
# stands for the byte.
SESSION = [
    "PING",
    "PING hi",
    "PING a b",
    "ECHO x",
    "ECHO",
    "ECHO a b",
    "SELECT",
    "SELECT x",
    "SELECT 99999999999",
    "SELECT 16",
    "SELECT 15",
    "HELLO 4",
    "HELLO x",
    "HELLO 2 FOO",
    "HELLO 2 AUTH a",
    "HELLO 2 AUTH foo bar",
    'HELLO 2 SETNAME "a b"',
    "HELLO 2 SETNAME",
    "CLIENT GETNAME",
    "AUTH x",
    "AUTH default x",
    "AUTH foo x",
    "AUTH a b c",
    "AUTH",
    'CLIENT SETNAME "a b"',
    "CLIENT SETNAME n1",
    "CLIENT GETNAME",
    'CLIENT SETNAME ""',
    "CLIENT GETNAME",
    "CLIENT SETNAME",
    "CLIENT LIST TYPE foo",
    "CLIENT LIST TYPE pubsub",
    "CLIENT LIST ID x",
    "CLIENT LIST ID 999999",
    "CLIENT LIST FOO",
    "CLIENT KILL 1.2.3.4:5",
    "CLIENT KILL ID x",
    "CLIENT KILL ID 0",
    "CLIENT KILL ID 99999",
    "CLIENT KILL ADDR",
    "CLIENT KILL ADDR 1.1.1.1:1 SKIPME",
    "CLIENT KILL ADDR 1.1.1.1:1 SKIPME maybe",
    "CLIENT KILL ADDR 1.1.1.1:1 SKIPME yes",
    "CLIENT KILL TYPE foo",
    "CLIENT KILL TYPE pubsub",
    "CLIENT KILL USER nosuch",
    "CLIENT KILL USER default ID 99999",
    "CLIENT KILL FOO bar",
    "CLIENT UNBLOCK x",
    "CLIENT UNBLOCK 999999",
    "CLIENT UNBLOCK 999999 FOO",
    "CLIENT UNBLOCK 999999 ERROR",
    "CLIENT NO-EVICT ON",
    "CLIENT NO-EVICT maybe",
    "CLIENT NO-EVICT",
    "CLIENT REPLY",
    "CLIENT REPLY foo",
    "CLIENT REPLY ON",
    "CLIENT PAUSE x",
    "CLIENT PAUSE -1",
    "CLIENT PAUSE 0 FOO",
    "CLIENT PAUSE 1 WRITE x",
    "CLIENT UNPAUSE",
    "CLIENT TRACKING OFF",
    "CLIENT TRACKING foo",
    "CLIENT TRACKINGINFO",
    "CLIENT GETREDIR",
    "CLIENT FOO",
    "CLIENT",
    'client "foo\\\\r\\\\nbar"',
    'foo "a\\\\r\\\\nb" c',
    "foo",
    "RESET x",
    "RESET",
    "COMMAND INFO nosuch",
    "COMMAND GETKEYS GET k",
    "COMMAND GETKEYS MSET a 1 b 2",
    "COMMAND GETKEYS foo a",
    "COMMAND GETKEYS PING a",
    "COMMAND GETKEYS GET a b",
    "COMMAND GETKEYS",
    "COMMAND GETKEYSANDFLAGS GET k",
    "COMMAND GETKEYSANDFLAGS RENAME k j",
    "COMMAND LIST FILTERBY MODULE x",
    "COMMAND LIST FILTERBY PATTERN getr*",
    "COMMAND LIST FILTERBY FOO x",
    "COMMAND LIST FOO",
    "COMMAND DOCS nosuch",
    "COMMAND FOO",
    "COMMAND COUNT x",
    "CONFIG GET nosuch",
    "CONFIG GET",
    "CONFIG GET save",
    "CONFIG GET maxmemory",
    "CONFIG GET maxmem*policy",
    "CONFIG SET nosuch 1",
    "CONFIG SET maxmemory",
    "CONFIG SET maxmemory x",
    "CONFIG SET maxmemory 100mb",
    "CONFIG GET MAXMEMORY",
    "CONFIG SET maxmemory 0 maxmemory 0",
    "CONFIG SET maxmemory 0",
    "CONFIG SET maxmemory 1 nosuch 2",
    "CONFIG GET maxmemory",
    "CONFIG SET appendfsync foo",
    "CONFIG RESETSTAT",
    "CONFIG REWRITE",
    "CONFIG FOO",
    "SLOWLOG GET x",
    "SLOWLOG GET -2",
    "SLOWLOG GET",
    "SLOWLOG GET 0",
    "SLOWLOG RESET",
    "SLOWLOG LEN",
    "SLOWLOG FOO",
    "LATENCY LATEST",
    "LATENCY HISTORY x",
    "LATENCY RESET",
    "LATENCY FOO",
    "MEMORY USAGE nosuch",
    "MEMORY USAGE nosuch SAMPLES",
    "MEMORY USAGE nosuch SAMPLES x",
    "MEMORY USAGE nosuch SAMPLES -1",
    "MEMORY USAGE nosuch FOO 1",
    "MEMORY FOO",
    "OBJECT ENCODING nosuch",
    "OBJECT REFCOUNT nosuch",
    "OBJECT FOO x",
    "MODULE LIST",
    "MODULE FOO",
    "CLUSTER NODES",
    "CLUSTER SLOTS",
    "ROLE",
    "WAIT x 0",
    "WAIT 0 x",
    "WAIT 0 -1",
    "WAIT 0 0",
    "ACL WHOAMI",
    "ACL USERS",
    "ACL FOO",
    "ACL CAT nosuch",
    "ACL CAT a b",
    "SHUTDOWN FOO",
    "SHUTDOWN ABORT",
    "SHUTDOWN SAVE NOSAVE",
    "BGSAVE foo",
    "LASTSAVE x",
    "TIME x",
    "FLUSHALL FOO",
    "FLUSHALL SYNC",
    "FLUSHALL SYNC x",
    "RANDOMKEY",
    "RANDOMKEY x",
    "HRANDFIELD nosuch",
    "HRANDFIELD nosuch 3",
    "HRANDFIELD nosuch 3 FOO",
    "HRANDFIELD nosuch 3 WITHVALUES",
    "HRANDFIELD nosuch x",
    "HRANDFIELD nosuch -9223372036854775808",
    "HRANDFIELD nosuch -9223372036854775807",
    "HRANDFIELD nosuch 9223372036854775807 WITHVALUES",
    "DEBUG",
    "INFO a b",
    "foo 1 2 3 4 5 6 7 8 9 " + "a" * 150 + " 10",
    "a" * 150 + " x",
    r"'\xff\xfe' '\xffx' y",
    "x " + r"'\xc3\xa9'" * 80,
    r"CLIENT '\xff'",
    r"'a\x00b' 'c\x00d'",
    r"SET k v '\xff'",
    r"EXPIRE k 1 '\xff'",
    r"CONFIG SET '\xff' 1",
    r"HELLO 3 '\xff'",
    "'' x",
]

# Later than the 7.0 that Debian has.
NEWER = {"client|setinfo", "client|no-touch"}


@pytest.fixture
def pair() -> Iterator[tuple[SocketClient, SocketClient]]:
    with redis_server() as redis, testing.server() as pion:
        ours, theirs = SocketClient((pion.host, pion.port)), SocketClient(redis)
        yield ours, theirs
        ours.close()
        theirs.close()


@pytest.mark.parametrize("proto", [2, 3])
def test_session(pair: tuple[SocketClient, SocketClient], proto: int) -> None:
    for server in pair:
        server("HELLO", proto)
    differences = []
    for line in SESSION:
        argv = [word.encode().decode("unicode_escape").encode("latin-1") for word in shlex.split(line)]
        one, other = (server(*argv) for server in pair)
        if one != other:
            differences.append(f"{line}: Pion {one!r}, Redis {other!r}")
        if argv[0] == b"RESET":
            for server in pair:
                server("HELLO", proto)
    assert not differences, "\n".join(differences)


def _words(reply: Any) -> list[bytes]:
    items = reply.items if isinstance(reply, Items) else reply
    return sorted(item.text for item in items if isinstance(item, Simple))


def _key_specs(reply: Any) -> list[Any]:
    """Key specs without the notes for humans."""
    return [
        [item for item in spec if item != b"notes" and not (isinstance(item, bytes) and b" " in item)] for spec in reply
    ]


def test_command_info(pair: tuple[SocketClient, SocketClient]) -> None:
    differences = []
    for record in table.walk():
        if "." in record.name or record.name in NEWER:
            continue
        one, other = (server("COMMAND", "INFO", record.name)[0] for server in pair)
        assert other is not None, f"{record.name} is not a command of Redis"
        for row in (one, other):
            row[2], row[6], row[8] = _words(row[2]), _words(row[6]), _key_specs(row[8])
        for at, what in enumerate(("name", "arity", "flags", "first", "last", "step", "categories", "tips", "keys")):
            if what != "tips" and one[at] != other[at]:
                differences.append(f"{record.name} {what}: Pion {one[at]!r}, Redis {other[at]!r}")
    assert not differences, "\n".join(differences)
