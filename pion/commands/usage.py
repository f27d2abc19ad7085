"""The arguments of every command as usage lines, turned into what COMMAND DOCS tells (redis-cli makes its hints of it).

Grammar of a line: lower case names an argument, upper case is a word as typed (with the argument that follows it, if
there is one), `[...]` is optional, `(...)` groups, `|` separates alternatives, `...` repeats what stands before it.
"""

from __future__ import annotations

import re
from typing import Any, Final

Argument = dict[str, Any]

USAGE: Final = """
HELLO [protover [AUTH username password] [SETNAME clientname]]
AUTH [username] password
PING [message]
ECHO message
SELECT index
CLIENT|SETNAME connection-name
CLIENT|SETINFO (LIB-NAME libname | LIB-VER libver)
CLIENT|LIST [TYPE (NORMAL | MASTER | REPLICA | PUBSUB)] [ID client-id...]
CLIENT|KILL (ip:port | (ID client-id | TYPE type | USER username | ADDR ip:port | LADDR ip:port | SKIPME yes/no)...)
CLIENT|UNBLOCK client-id [TIMEOUT | ERROR]
CLIENT|NO-EVICT (ON | OFF)
CLIENT|NO-TOUCH (ON | OFF)
CLIENT|REPLY (ON | OFF | SKIP)
CLIENT|PAUSE timeout [WRITE | ALL]
CLIENT|TRACKING (ON | OFF)
CONFIG|GET parameter...
CONFIG|SET (parameter value)...
COMMAND|INFO [command-name...]
COMMAND|DOCS [command-name...]
COMMAND|LIST [FILTERBY (MODULE module-name | ACLCAT category | PATTERN pattern)]
COMMAND|GETKEYS command [arg...]
COMMAND|GETKEYSANDFLAGS command [arg...]
ACL|CAT [category]
INFO [section...]
BGSAVE [SCHEDULE]
SHUTDOWN [NOSAVE | SAVE] [NOW] [FORCE] [ABORT]
SLOWLOG|GET [count]
LATENCY|HISTORY event
LATENCY|RESET [event...]
LATENCY|HISTOGRAM [command...]
MEMORY|USAGE key [SAMPLES count]
OBJECT|ENCODING key
OBJECT|REFCOUNT key
OBJECT|IDLETIME key
OBJECT|FREQ key
WAIT numreplicas timeout
GET key
SET key value [NX | XX] [GET] [EX seconds | PX milliseconds | EXAT unix-time | PXAT unix-time-ms | KEEPTTL]
SETNX key value
SETEX key seconds value
PSETEX key milliseconds value
GETSET key value
GETDEL key
GETEX key [EX seconds | PX milliseconds | EXAT unix-time | PXAT unix-time-ms | PERSIST]
MGET key...
MSET (key value)...
MSETNX (key value)...
INCR key
DECR key
INCRBY key increment
DECRBY key decrement
INCRBYFLOAT key float
APPEND key value
STRLEN key
GETRANGE key start end
SUBSTR key start end
SETRANGE key offset value
DEL key...
UNLINK key...
EXISTS key...
TOUCH key...
TYPE key
EXPIRE key seconds [NX | XX | GT | LT]
PEXPIRE key milliseconds [NX | XX | GT | LT]
EXPIREAT key unix-time [NX | XX | GT | LT]
PEXPIREAT key unix-time-ms [NX | XX | GT | LT]
TTL key
PTTL key
EXPIRETIME key
PEXPIRETIME key
PERSIST key
RENAME key newkey
RENAMENX key newkey
COPY key newkey [DB index] [REPLACE]
KEYS pattern
SCAN cursor [MATCH pattern] [COUNT count] [TYPE type]
FLUSHDB [ASYNC | SYNC]
FLUSHALL [ASYNC | SYNC]
HSET key (field value)...
HMSET key (field value)...
HSETNX key field value
HGET key field
HMGET key field...
HGETALL key
HDEL key field...
HLEN key
HEXISTS key field
HKEYS key
HVALS key
HSTRLEN key field
HINCRBY key field increment
HINCRBYFLOAT key field float
HRANDFIELD key [count [WITHVALUES]]
HSCAN key cursor [MATCH pattern] [COUNT count]
ZADD key [NX | XX] [GT | LT] [CH] [INCR] (score member)...
ZINCRBY key float member
ZREM key member...
ZSCORE key member
ZMSCORE key member...
ZCARD key
ZRANK key member
ZREVRANK key member
ZRANGE key min max [BYSCORE | BYLEX] [REV] [LIMIT offset count] [WITHSCORES]
ZREVRANGE key start stop [WITHSCORES]
ZRANGEBYSCORE key min max [WITHSCORES] [LIMIT offset count]
ZREVRANGEBYSCORE key max min [WITHSCORES] [LIMIT offset count]
ZRANGEBYLEX key min max [LIMIT offset count]
ZREVRANGEBYLEX key max min [LIMIT offset count]
ZCOUNT key min max
ZLEXCOUNT key min max
ZREMRANGEBYRANK key start stop
ZREMRANGEBYSCORE key min max
ZREMRANGEBYLEX key min max
ZPOPMIN key [count]
ZPOPMAX key [count]
ZSCAN key cursor [MATCH pattern] [COUNT count]
KV.PREFIX.REGISTER namespace kv-dim vquant [BLOCKS block-size count hashes] [PREFILL_MS milliseconds] [ROWS rows]\
 [LAYERS layers] [DIGEST hex] [SCOPE scope] [PARENT namespace] [HEADS heads] [HEAD_DIM head-dim] [ROPE theta]\
 [REPLACE]
KV.PREFIX.REGISTER.SCHEMA namespace layers k-spec... v-spec... [BLOCKS block-size count hashes]\
 [PREFILL_MS milliseconds] [ROWS rows] [LAYERS layers] [DIGEST hex] [SCOPE scope] [PARENT namespace] [HEADS heads]\
 [HEAD_DIM head-dim] [ROPE theta] [REPLACE]
KV.PREFIX.LOOKUP namespace [TOKENS tokens] [PREFILL_MS milliseconds] [DIGEST hex]
KV.PREFIX.DROP namespace...
KV.PREFIX.OWNER namespace
KV.PREFIX.BLOCKS namespace
KV.PREFIX.MEMBERSHIP namespace count hashes
KV.PREFIX.WHY namespace
KV.PREFIX.PIN namespace...
KV.PREFIX.ABANDON namespace digest
KV.PREFIX.UNPIN namespace...
KV.PREFIX.EXPIRE namespace seconds [NX | XX | GT | LT]
KV.PREFIX.PERSIST namespace
KV.PREFIX.LEASE namespace milliseconds [OWNER name]
KV.PREFIX.INFO [namespace]
KV.PREFIX.LIST [SCOPE scope] [MATCH pattern] [COUNT count] cursor
KV.PREFIX.MATCH scope count hashes [LIMIT limit]
KV.PREFIX.LANE namespace
KV.PREFIX.SAVE [path]
V.CREATE sid (dim [VQUANT format] | [default-dim] SCHEMA layers spec...)
V.STOREBATCH sid layer start count values [FMT (F32 | F16 | BF16)] [DIGEST hex]
V.FETCH sid (layer (RANGE start end | token-id...) | BATCH start end [layers]) [FMT (NATIVE | RAW)]
V.INFO [sid]
V.SNAPSHOT sid
V.RESTORE sid snapshot
V.COMMIT sid snapshot
V.EXPORT k-sid v-sid start end layers heads head-dim
SSM.PREFIX.STORE sid layer value [DIGEST hex]
SSM.PREFIX.FETCH sid layer
SSM.PREFIX.DROP sid [layer]
KV.PREFIX.WARM namespace kv-heads head-dim [sid [DIGEST hex]]
ATTEND.PREFIX.STORE sid layer kv-heads rows head-dim keys values
ATTEND.PREFIX.LOOKUP sid layer
ATTEND.PREFIX.QUERY sid layer heads head-dim top-k queries [fa-window] [SINKS sinks] [WITHLSE]
ATTEND.PREFIX.QUERY_FUSED sid layer heads head-dim suffix-rows kv-heads queries suffix-keys suffix-values head-map\
 [fa-window] [SINKS sinks]
ATTEND.PREFIX.QUERY_SPARSE sid layer heads head-dim most-indices queries indices counts [fa-window] [SINKS sinks]\
 [WITHMASS]
ATTEND.PREFIX.QUERY_SPARSE_AUTO sid layer heads head-dim block-size top-blocks kv-heads queries head-map\
 [fa-window [selector]] [SINKS sinks] [WITHMASS]
ATTEND.PREFIX.QUERY_SPARSE_AUTO_FUSED sid layer heads head-dim block-size top-blocks kv-heads suffix-rows queries\
 suffix-keys suffix-values head-map [fa-window [selector]] [SINKS sinks] [WITHMASS]
ATTEND.PREFIX.DROP sid...
ATTEND.PREFIX.INFO [sid]
PION.STATS [RESET]
"""

_INTEGERS: Final = frozenset(
    {
        "seconds", "milliseconds", "count", "index", "cursor", "increment", "decrement", "offset", "start", "end",
        "stop", "timeout", "protover", "layers", "layer", "rows", "tokens", "heads", "head-dim", "kv-dim", "dim",
        "client-id", "numreplicas", "snapshot", "block-size", "token-id", "limit", "kv-heads", "top-k", "fa-window",
        "suffix-rows", "most-indices", "top-blocks", "selector",
    }
)  # fmt: skip
_UNIX: Final = frozenset({"unix-time", "unix-time-ms"})
_DOUBLES: Final = frozenset({"score", "float", "theta"})
_TOKEN: Final = re.compile(r"\.\.\.|[\[\]()|]|[^\s\[\]()|.]+(?:\.[^\s\[\]()|.]+)*")


def lines() -> dict[str, str]:
    """Usage by command name, lower case."""
    out = {}
    for line in USAGE.strip().splitlines():
        name, _, rest = line.partition(" ")
        out[name.lower()] = rest
    return out


def arguments(usage: str) -> list[Argument]:
    """The argument tree of a usage line: `name`, `type`, `token`, `flags` and `arguments` as in COMMAND DOCS."""
    words = _TOKEN.findall(usage)
    out = _sequence(words)
    if words:
        raise ValueError(f"cannot read the usage line {usage!r} at {words[0]!r}")
    return out


def _sequence(words: list[str]) -> list[Argument]:
    out: list[Argument] = []
    while words and words[0] not in ("]", ")", "|"):
        word = words.pop(0)
        if word in ("[", "("):
            node = _choice(words)
            if words.pop(0) != {"[": "]", "(": ")"}[word]:
                raise ValueError("unbalanced brackets in a usage line")
            if word == "[":
                node.setdefault("flags", []).append("optional")
        elif word == word.upper():
            node = {"name": word.lower(), "type": "pure-token", "token": word}
            if words and _is_name(words[0]):
                node = {**_named(words.pop(0)), "token": word}
            elif words and words[0] == "(":
                words.pop(0)
                node = {**_choice(words), "token": word}
                words.pop(0)
        else:
            node = _named(word)
        if words and words[0] == "...":
            words.pop(0)
            node.setdefault("flags", []).append("multiple")
        out.append(node)
    return out


def _choice(words: list[str]) -> Argument:
    """Alternatives up to the closing bracket, which stays."""
    options = [_single(_sequence(words))]
    while words and words[0] == "|":
        words.pop(0)
        options.append(_single(_sequence(words)))
    if len(options) == 1:
        return options[0]
    return {"name": options[0]["name"], "type": "oneof", "arguments": options}


def _single(items: list[Argument]) -> Argument:
    if len(items) == 1:
        return items[0]
    head, *rest = items
    if head["type"] == "pure-token" and rest:
        # `LIMIT offset count`: the word belongs to the block.
        return {"name": head["name"], "type": "block", "token": head["token"], "arguments": rest}
    if "token" in head:
        token = head["token"]
        return {
            "name": token.lower(),
            "type": "block",
            "token": token,
            "arguments": [{key: value for key, value in head.items() if key != "token"}, *rest],
        }
    return {"name": head["name"], "type": "block", "arguments": items}


def _is_name(word: str) -> bool:
    return word not in ("[", "]", "(", ")", "|", "...") and word != word.upper()


def _named(name: str) -> Argument:
    kind = "string"
    if name in ("key", "newkey"):
        kind = "key"
    elif name == "pattern":
        kind = "pattern"
    elif name in _INTEGERS:
        kind = "integer"
    elif name in _UNIX:
        kind = "unix-time"
    elif name in _DOUBLES:
        kind = "double"
    return {"name": name, "type": kind}
