"""Random commands over small pools of keys, fields and values, so that they meet each other."""

from __future__ import annotations

from hypothesis import strategies as st

from pion.commands.table import COMMANDS

Argv = list[bytes]

KEYS = [b"k1", b"k2", b"k3", b"key:4"]
FIELDS = [b"f1", b"f2", b"", b"\x00\xff"]
VALUES = [
    b"", b"a", b"hello world", b"10", b"-5", b"3.5", b" 1", b"1e3", b"0x10", b"nan", b"inf", b"-inf", b"\x00\r\n\xff",
    b"9223372036854775807", b"-9223372036854775808", b"18446744073709551616", b"007", b"+1", b"1000.1", b"x" * 60,
]  # fmt: skip
INTEGERS = [b"0", b"1", b"-1", b"3", b"-7", b"9223372036854775807", b"-9223372036854775808", b"abc", b"1.5", b""]
INDEXES = [b"0", b"1", b"2", b"-1", b"-2", b"-100", b"100", b"x"]
FLOATS = [b"0", b"1.5", b"-2.25", b"3", b"1e2", b"0.1", b"1e400", b"inf", b"-inf", b"nan", b"abc", b"", b" 1", b"0x1p3"]
SCORES = [b"0", b"1", b"2", b"-1.5", b"1.1", b"inf", b"-inf", b"1e300", b"nan", b"abc"]
MEMBERS = [b"m1", b"m2", b"m3", b"", b"\xffz"]
# Never between now and the end of a test: in the past at once, or far away.
SECONDS = [b"100", b"5000", b"0", b"-1", b"9223372036854775807", b"9223372036854775", b"abc"]
MILLISECONDS = [b"100000", b"5000000", b"0", b"-1", b"9223372036854775807", b"abc"]
SET_TIMES = [b"4102444800", b"0", b"-1", b"abc"]  # a SET in the past counts in Redis's DBSIZE until it is collected
SET_TIMES_MS = [b"4102444800000", b"0", b"-1"]
TIMES = [b"1", b"100", b"4102444800", b"0", b"-1", b"9223372036854775807", b"abc"]
TIMES_MS = [b"1", b"100", b"4102444800000", b"0", b"-1", b"9223372036854775807"]
PATTERNS = [b"*", b"k*", b"k?", b"k[1-2]", b"k[^1]", b"[fk]1", b"*4", b"\\k1", b"key:*", b"m*", b"f[", b"k[2-1]", b""]
SCORE_ENDS = [b"-inf", b"+inf", b"0", b"(0", b"1", b"(1", b"2", b"(1.1", b"abc", b"nan", b"("]
NAME_ENDS = [b"-", b"+", b"[m1", b"(m1", b"[m3", b"[", b"m1", b"("]

key, field, value, member = (st.sampled_from(pool) for pool in (KEYS, FIELDS, VALUES, MEMBERS))
integer, index, number, score = (st.sampled_from(pool) for pool in (INTEGERS, INDEXES, FLOATS, SCORES))
pattern = st.sampled_from(PATTERNS)
lex = st.sampled_from([b"lex1", b"lex2"])  # all scores the same: only then are ranges of names defined


def words(*choices: bytes) -> st.SearchStrategy[Argv]:
    """Any few of these options, in any case."""
    return st.lists(st.sampled_from(choices).flatmap(lambda w: st.sampled_from([w, w.lower()])), max_size=2)


def call(name: str, *parts: st.SearchStrategy[bytes] | st.SearchStrategy[Argv]) -> st.SearchStrategy[Argv]:
    """A command from its name and strategies of arguments or of lists of arguments."""

    def flat(drawn: tuple[bytes | Argv, ...]) -> Argv:
        out = name.encode().split(b" ")
        for part in drawn:
            out += part if isinstance(part, list) else [part]
        return out

    return st.tuples(*parts).map(flat)  # type: ignore[arg-type]


def many(*parts: st.SearchStrategy[bytes], size: int = 3) -> st.SearchStrategy[Argv]:
    """One to `size` repetitions of a group of arguments."""
    return st.lists(st.tuples(*parts), min_size=1, max_size=size).map(
        lambda rows: [item for row in rows for item in row]
    )


def expiry(*extra: bytes) -> st.SearchStrategy[Argv]:
    timed = [(b"EX", SECONDS), (b"PX", MILLISECONDS), (b"EXAT", SET_TIMES), (b"PXAT", SET_TIMES_MS)]
    options = [st.tuples(st.just(name), st.sampled_from(pool)).map(list) for name, pool in timed]
    options += [st.just([word]) for word in extra]
    return st.lists(st.one_of(options), max_size=2).map(lambda rows: [item for row in rows for item in row])


def optional(strategy: st.SearchStrategy[Argv]) -> st.SearchStrategy[Argv]:
    return st.one_of(st.just([]), strategy)


conditions = words(b"NX", b"XX", b"GT", b"LT", b"ZZ")
scan_tail = st.lists(
    st.one_of(
        st.tuples(st.just(b"MATCH"), pattern),
        st.tuples(st.just(b"COUNT"), st.sampled_from([b"100", b"1000", b"0", b"x"])),
    ),
    max_size=2,
).map(lambda rows: [item for row in rows for item in row])
zadd_options = st.lists(st.sampled_from([b"NX", b"XX", b"GT", b"LT", b"CH", b"INCR", b"nx", b"ch"]), max_size=3)
range_tail = st.lists(
    st.one_of(
        st.just([b"WITHSCORES"]), st.just([b"REV"]), st.just([b"BYSCORE"]),
        st.tuples(st.just(b"LIMIT"), index, index).map(list), st.just([b"LIMIT"]),
    ),
    max_size=3,
).map(lambda rows: [item for row in rows for item in row])  # fmt: skip
any_end = st.sampled_from(SCORE_ENDS + NAME_ENDS + INDEXES)
score_end, name_end = st.sampled_from(SCORE_ENDS), st.sampled_from(NAME_ENDS)

STRINGS = [
    call("GET", key), call("SET", key, value), call("SET", key, value, expiry(b"NX", b"XX", b"GET", b"KEEPTTL", b"nx")),
    call("SETNX", key, value), call("SETEX", key, st.sampled_from(SECONDS), value),
    call("PSETEX", key, st.sampled_from(MILLISECONDS), value), call("GETSET", key, value), call("GETDEL", key),
    call("GETEX", key, expiry(b"PERSIST", b"NX")), call("MGET", many(key)), call("MSET", many(key, value)),
    call("MSETNX", many(key, value)), call("INCR", key), call("DECR", key), call("INCRBY", key, integer),
    call("DECRBY", key, integer), call("INCRBYFLOAT", key, number), call("APPEND", key, value), call("STRLEN", key),
    call("GETRANGE", key, index, index), call("SUBSTR", key, index, index),
    call("SETRANGE", key, st.sampled_from([b"0", b"2", b"10", b"-1", b"600000000", b"x"]), value),
]  # fmt: skip

GENERIC = [
    call("DEL", many(key)), call("UNLINK", many(key)), call("EXISTS", many(key)), call("TOUCH", many(key)),
    call("TYPE", key), call("EXPIRE", key, st.sampled_from(SECONDS), conditions),
    call("PEXPIRE", key, st.sampled_from(MILLISECONDS), conditions),
    call("EXPIREAT", key, st.sampled_from(TIMES), conditions),
    call("PEXPIREAT", key, st.sampled_from(TIMES_MS), conditions), call("TTL", key), call("PTTL", key),
    call("EXPIRETIME", key), call("PEXPIRETIME", key), call("PERSIST", key), call("RENAME", key, key),
    call("RENAMENX", key, key), call("KEYS", pattern), call("SCAN", st.just(b"0"), scan_tail), call("DBSIZE"),
    call("SCAN", st.just(b"0"), st.sampled_from([b"string", b"hash", b"zset", b"ZSET"]).map(lambda t: [b"TYPE", t])),
    call("SELECT", st.sampled_from([b"0", b"0", b"1", b"15", b"16", b"-1", b"x"])),
    call("FLUSHDB", words(b"SYNC", b"ASYNC", b"NOW")),
    call("COPY", key, key, words(b"REPLACE", b"DB", b"1")),
    call("COPY", key, key, st.sampled_from([[b"DB", b"1"], [b"DB", b"16"], [b"DB", b"x"], [b"DB", b"0", b"REPLACE"]])),
]  # fmt: skip

HASHES = [
    call("HSET", key, many(field, value)), call("HSET", key, field, value), call("HMSET", key, many(field, value)),
    call("HSETNX", key, field, value), call("HGET", key, field), call("HMGET", key, many(field)), call("HGETALL", key),
    call("HDEL", key, many(field)), call("HLEN", key), call("HEXISTS", key, field), call("HKEYS", key),
    call("HVALS", key), call("HSTRLEN", key, field), call("HINCRBY", key, field, integer),
    call("HINCRBYFLOAT", key, field, number), call("HSCAN", key, st.just(b"0"), scan_tail),
]  # fmt: skip

ZSETS = [
    call("ZADD", key, zadd_options, many(score, member)), call("ZADD", key, many(score, member)),
    call("ZINCRBY", key, score, member), call("ZREM", key, many(member)), call("ZSCORE", key, member),
    call("ZMSCORE", key, many(member)), call("ZCARD", key), call("ZRANK", key, member), call("ZREVRANK", key, member),
    call("ZRANGE", key, index, index, range_tail), call("ZRANGE", key, any_end, any_end, range_tail),
    call("ZREVRANGE", key, index, index, words(b"WITHSCORES")),
    call("ZRANGEBYSCORE", key, score_end, score_end, range_tail),
    call("ZREVRANGEBYSCORE", key, score_end, score_end, range_tail),
    call("ZADD", lex, st.just(b"0"), member), call("ZRANGE", lex, name_end, name_end, st.just([b"BYLEX"]), range_tail),
    call("ZRANGEBYLEX", lex, name_end, name_end, range_tail),
    call("ZREVRANGEBYLEX", lex, name_end, name_end, range_tail),
    call("ZCOUNT", key, score_end, score_end), call("ZLEXCOUNT", lex, name_end, name_end),
    call("ZREMRANGEBYRANK", key, index, index), call("ZREMRANGEBYSCORE", key, score_end, score_end),
    call("ZREMRANGEBYLEX", lex, name_end, name_end), call("ZPOPMIN", key), call("ZPOPMAX", key),
    call("ZPOPMIN", key, index.map(lambda raw: [raw])), call("ZPOPMAX", key, index.map(lambda raw: [raw])),
    call("ZSCAN", key, st.just(b"0"), scan_tail),
]  # fmt: skip

# By chance or by time, or about the server: not comparable from random arguments.
_APART = {b"randomkey", b"hrandfield", b"flushall", b"dbsize"}
WILD_NAMES = sorted(
    name
    for name, record in COMMANDS.items()
    if record.group in ("string", "generic", "hash", "sorted-set")
    and name not in _APART
    and not record.subcommands
    and b"lex" not in name
)
WILD_WORDS = [
    *KEYS, b"f1", b"m1", b"", b"0", b"-1", b"100000", b"2147483648", b"9223372036854775807", b"abc", b"1.5", b"inf",
    b"NX", b"XX", b"GT", b"LT", b"CH", b"INCR", b"EX", b"PX", b"EXAT", b"KEEPTTL", b"GET", b"PERSIST", b"MATCH",
    b"COUNT", b"LIMIT", b"BYSCORE", b"REV", b"WITHSCORES", b"[a", b"(1", b"-", b"+", b"*", b"TYPE",
]  # fmt: skip
wild = st.builds(
    lambda name, tail: [name, *tail], st.sampled_from(WILD_NAMES), st.lists(st.sampled_from(WILD_WORDS), max_size=6)
)


def mixed(*families: list[st.SearchStrategy[Argv]]) -> st.SearchStrategy[list[Argv]]:
    """Sequences of commands of these families."""
    return st.lists(st.one_of([strategy for family in families for strategy in family]), min_size=5, max_size=40)
