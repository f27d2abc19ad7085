"""Golden bytes of the connection and server commands, typed from the command pages of Redis 7."""

from __future__ import annotations

import re

from tests.golden.kit import INT, NIL, OK, PONG, Golden, bulk, case, cmd, err, errors

SYNTAX = "ERR syntax error"
NOT_INT = "ERR value is not an integer or out of range"


def _hello(proto: int, head: bytes) -> re.Pattern[bytes]:
    body = rb"\$6\r\nserver\r\n\$4\r\npion\r\n\$7\r\nversion\r\n\$5\r\n7\.0\.0\r\n\$5\r\nproto\r\n:%d\r\n" % proto
    tail = rb"\$4\r\nmode\r\n\$10\r\nstandalone\r\n\$4\r\nrole\r\n\$6\r\nmaster\r\n\$7\r\nmodules\r\n\*0\r\n"
    return re.compile(head + body + rb"\$2\r\nid\r\n:\d+\r\n" + tail)


def text(pattern: bytes) -> tuple[re.Pattern[bytes], re.Pattern[bytes]]:
    """A bulk in RESP2, a verbatim string in RESP3, whose text matches."""
    return (
        re.compile(rb"\$\d+\r\n" + pattern + rb"\r\n", re.DOTALL),
        re.compile(rb"=\d+\r\ntxt:" + pattern + rb"\r\n", re.DOTALL),
    )


CONNECTION = [
    case(
        "ping echo",
        "PING",
        (cmd("PING"), PONG),
        (cmd("PING hi"), bulk(b"hi")),
        (cmd("ECHO x"), bulk(b"x")),
        (cmd("PING a b"), err("ERR wrong number of arguments for 'ping' command")),
    ),
    case(
        "hello",
        "HELLO",
        (cmd("HELLO 3"), _hello(3, b"%7\r\n")),
        (cmd("HELLO"), _hello(3, b"%7\r\n")),
        (cmd("HELLO 2"), _hello(2, rb"\*14\r\n")),
        (cmd("HELLO 2 SETNAME me"), _hello(2, rb"\*14\r\n")),
        (cmd("CLIENT GETNAME"), bulk(b"me")),
    ),
    errors(
        "a8-hello-refused",
        "HELLO",
        (cmd("HELLO 4"), "NOPROTO unsupported protocol version"),
        (cmd("HELLO x"), "ERR Protocol version is not an integer or out of range"),
        (cmd("HELLO 3 AUTH user wrong"), "WRONGPASS invalid username-password pair or user is disabled."),
        (cmd("HELLO 3 FOO"), "ERR Syntax error in HELLO option 'FOO'"),
        (cmd("HELLO 3 SETNAME %", b"a b"), "ERR Client names cannot contain spaces, newlines or special characters."),
    ),
    errors(
        "auth without password",
        "AUTH",
        (
            cmd("AUTH pw"),
            "ERR AUTH <password> called without any password configured "
            "for the default user. Are you sure your configuration is correct?",
        ),
        (cmd("AUTH nobody pw"), "WRONGPASS invalid username-password pair or user is disabled."),
        (cmd("AUTH a b c"), SYNTAX),
    ),
    case(
        "client",
        "CLIENT",
        (cmd("CLIENT ID"), INT),
        (cmd("CLIENT SETNAME n1"), OK),
        (cmd("CLIENT GETNAME"), bulk(b"n1")),
        (cmd("CLIENT SETNAME %", b""), OK),
        (cmd("CLIENT GETNAME"), NIL),
        (cmd("CLIENT SETINFO LIB-NAME redis-py"), OK),
        (cmd("CLIENT SETINFO LIB-VER 8.1.0"), OK),
        (cmd("CLIENT INFO"), text(rb"id=\d+ .* lib-name=redis-py lib-ver=8.1.0\n")),
        (cmd("CLIENT LIST"), text(rb"id=.*\n")),
        (cmd("CLIENT NO-EVICT ON"), OK),
        (cmd("CLIENT TRACKING OFF"), OK),
        (cmd("CLIENT GETREDIR"), b":-1\r\n"),
    ),
    errors(
        "a8-unknown-subcommand",
        "CLIENT",
        (
            cmd("CLIENT MAINT_NOTIFICATIONS ON moving-endpoint-type internal-fqdn"),
            "ERR unknown subcommand 'MAINT_NOTIFICATIONS'. Try CLIENT HELP.",
        ),
        (cmd("CONFIG FOO"), "ERR unknown subcommand 'FOO'. Try CONFIG HELP."),
        (cmd("CLIENT"), "ERR wrong number of arguments for 'client' command"),
        (cmd("CLIENT SETNAME"), "ERR wrong number of arguments for 'client|setname' command"),
        (cmd("CLIENT SETINFO FOO x"), "ERR Unrecognized option 'FOO'"),
        (cmd("CLIENT KILL 127.0.0.1:1"), "ERR No such client"),
    ),
    case(
        "client kill",
        "CLIENT KILL",
        (cmd("CLIENT KILL ADDR 127.0.0.1:1"), b":0\r\n"),
        (cmd("CLIENT KILL ID 99999999"), b":0\r\n"),
        (cmd("CLIENT UNBLOCK 99999999"), b":0\r\n"),
    ),
    errors(
        "unknown command",
        "errors",
        (cmd("NOSUCH"), "ERR unknown command 'NOSUCH', with args beginning with: "),
        (cmd("nosuch a %", b"b\r\nc"), "ERR unknown command 'nosuch', with args beginning with: 'a' 'b  c' "),
        (cmd("GET"), "ERR wrong number of arguments for 'get' command"),
        (cmd("EVAL %", b"return 1"), "ERR unknown command 'EVAL', with args beginning with: 'return 1' "),
    ),
    errors(
        "a10-no-pubsub",
        "SUBSCRIBE",
        (cmd("SUBSCRIBE ch"), "ERR unknown command 'SUBSCRIBE', with args beginning with: 'ch' "),
        (cmd("MULTI"), "ERR unknown command 'MULTI', with args beginning with: "),
    ),
]

SERVER = [
    case(
        "time role wait",
        "ROLE",
        (cmd("TIME"), re.compile(rb"\*2\r\n\$10\r\n\d{10}\r\n\$\d\r\n\d{1,6}\r\n")),
        (cmd("ROLE"), b"*3\r\n$6\r\nmaster\r\n:0\r\n*0\r\n"),
        (cmd("WAIT 0 0"), b":0\r\n"),
        (cmd("MODULE LIST"), b"*0\r\n"),
        (cmd("ACL WHOAMI"), bulk(b"default")),
        (cmd("LASTSAVE"), INT),
        (cmd("LATENCY LATEST"), b"*0\r\n"),
        (cmd("CLUSTER INFO"), bulk(b"cluster_enabled:0\r\n")),
        (cmd("CLUSTER SLOTS"), err("ERR This instance has cluster support disabled")),
    ),
    case(
        "config",
        "CONFIG GET",
        (cmd("CONFIG GET save"), (b"*2\r\n$4\r\nsave\r\n$0\r\n\r\n", b"%1\r\n$4\r\nsave\r\n$0\r\n\r\n")),
        (cmd("CONFIG GET nosuch"), (b"*0\r\n", b"%0\r\n")),
        (cmd("CONFIG SET maxmemory 100mb"), OK),
        (
            cmd("CONFIG GET maxmemory"),
            (b"*2\r\n$9\r\nmaxmemory\r\n$9\r\n104857600\r\n", b"%1\r\n$9\r\nmaxmemory\r\n$9\r\n104857600\r\n"),
        ),
        (cmd("CONFIG SET maxmemory 0"), OK),
        (cmd("CONFIG RESETSTAT"), OK),
    ),
    errors(
        "config refused",
        "CONFIG SET",
        (cmd("CONFIG SET nosuch 1"), "ERR Unknown option or number of arguments for CONFIG SET - 'nosuch'"),
        (
            cmd("CONFIG SET maxmemory x"),
            "ERR CONFIG SET failed (possibly related to argument 'maxmemory') - argument must be a memory value",
        ),
        (
            cmd("CONFIG SET databases 3"),
            "ERR CONFIG SET failed (possibly related to argument 'databases') - can't set immutable config",
        ),
    ),
    case(
        "slowlog",
        "SLOWLOG",
        (cmd("SLOWLOG RESET"), OK),
        (cmd("SLOWLOG LEN"), b":0\r\n"),
        (cmd("SLOWLOG GET"), b"*0\r\n"),
        (cmd("CONFIG SET slowlog-log-slower-than 0"), OK),
        (cmd("ECHO slow"), bulk(b"slow")),
        (cmd("CONFIG SET slowlog-log-slower-than 10000"), OK),
        (cmd("SLOWLOG GET -1"), re.compile(rb"\*2\r\n.*\*2\r\n\$4\r\nECHO\r\n\$4\r\nslow\r\n.*", re.DOTALL)),
        (cmd("SLOWLOG RESET"), OK),
    ),
    case(
        "command",
        "COMMAND",
        (
            cmd("COMMAND INFO get nosuch"),
            (
                b"*2\r\n*10\r\n$3\r\nget\r\n:2\r\n*2\r\n+readonly\r\n+fast\r\n:1\r\n:1\r\n:1\r\n*3\r\n+@fast\r\n+@read\r\n+@string\r\n"
                b"*0\r\n*1\r\n*6\r\n$5\r\nflags\r\n*2\r\n+RO\r\n+access\r\n$12\r\nbegin_search\r\n*4\r\n$4\r\ntype\r\n$5\r\nindex\r\n"
                b"$4\r\nspec\r\n*2\r\n$5\r\nindex\r\n:1\r\n$9\r\nfind_keys\r\n*4\r\n$4\r\ntype\r\n$5\r\nrange\r\n$4\r\nspec\r\n*6\r\n"
                b"$7\r\nlastkey\r\n:0\r\n$7\r\nkeystep\r\n:1\r\n$5\r\nlimit\r\n:0\r\n*0\r\n$-1\r\n",
                b"*2\r\n*10\r\n$3\r\nget\r\n:2\r\n~2\r\n+readonly\r\n+fast\r\n:1\r\n:1\r\n:1\r\n~3\r\n+@fast\r\n+@read\r\n+@string\r\n"
                b"~0\r\n~1\r\n%3\r\n$5\r\nflags\r\n~2\r\n+RO\r\n+access\r\n$12\r\nbegin_search\r\n%2\r\n$4\r\ntype\r\n$5\r\nindex\r\n"
                b"$4\r\nspec\r\n%1\r\n$5\r\nindex\r\n:1\r\n$9\r\nfind_keys\r\n%2\r\n$4\r\ntype\r\n$5\r\nrange\r\n$4\r\nspec\r\n%3\r\n"
                b"$7\r\nlastkey\r\n:0\r\n$7\r\nkeystep\r\n:1\r\n$5\r\nlimit\r\n:0\r\n~0\r\n_\r\n",
            ),
        ),
        (cmd("COMMAND GETKEYS MSET a 1 b 2"), b"*2\r\n$1\r\na\r\n$1\r\nb\r\n"),
        (cmd("COMMAND COUNT"), INT),
        (cmd("COMMAND LIST FILTERBY PATTERN getr*"), b"*1\r\n$8\r\ngetrange\r\n"),
        (cmd("COMMAND DOCS nosuch"), (b"*0\r\n", b"%0\r\n")),
    ),
    case(
        "info",
        "INFO",
        (cmd("INFO replication"), text(rb"# Replication\r\nrole:master\r\n.*")),
        (
            cmd("INFO server clients"),
            text(rb"# Server\r\nredis_version:7\.0\.0\r\n.*\r\n# Clients\r\nconnected_clients:\d+\r\n.*"),
        ),
        (cmd("INFO nosuch"), text(b"")),
        (
            cmd("INFO"),
            text(
                rb"# Server\r\n.*# Clients\r\n.*# Memory\r\n.*# Persistence\r\n.*# Stats\r\n.*# Replication\r\n.*"
                rb"# CPU\r\n.*# Errorstats\r\n.*# Cluster\r\n.*# Keyspace\r\n.*# Pion\r\n.*"
            ),
        ),
        (cmd("SET k v EX 100"), OK),
        (cmd("INFO keyspace"), text(rb"# Keyspace\r\ndb0:keys=1,expires=1,avg_ttl=\d+\r\n")),
    ),
    case(
        "debug",
        "DEBUG",
        (cmd("DEBUG SLEEP 0"), err("ERR DEBUG command not allowed.")),
        (cmd("SHUTDOWN ABORT"), err("ERR No shutdown in progress.")),
        (cmd("SHUTDOWN FOO"), err(SYNTAX)),
        (cmd("CONFIG REWRITE"), err("ERR The server is running without a config file")),
    ),
]

CASES: list[Golden] = [*CONNECTION, *SERVER]
