"""Golden bytes of SSM.PREFIX.* (wire §7), PION.STATS and the receipt in INFO (wire §8)."""

from __future__ import annotations

import re

from tests.golden.kit import NIL, NOT_INT, OK, bulk, case, cmd, errors, f16, f32
from tests.golden.kv_prefix import HIT, MISS

# §8: sixteen pairs in this order; integers but for the two seconds fields, which are text S.mmm
FIELDS = (
    b"worker_id",
    b"uptime_in_seconds",
    b"kvprefix_hits",
    b"kvprefix_misses",
    b"kvprefix_hits_measured",
    b"kvprefix_tokens_served",
    b"kvprefix_bytes_served",
    b"kvprefix_prefill_us_saved",
    b"kvprefix_prefill_us_measured",
    b"prefill_seconds_avoided",
    b"prefill_seconds_avoided_measured",
    b"semantic_hits",
    b"semantic_misses",
    b"moe_hits",
    b"moe_misses",
    b"vector_queries",
)


def stats(*counters: int, saved: bytes, measured: bytes) -> tuple[re.Pattern[bytes], re.Pattern[bytes]]:
    """The reply of PION.STATS for hits, misses, hits_measured, tokens, bytes, us_saved, us_measured."""
    values: list[bytes] = [rb":0\r\n", rb":\d+\r\n", *[rb":%d\r\n" % n for n in counters]]
    values += [rb"\$%d\r\n%s\r\n" % (len(text), re.escape(text)) for text in (saved, measured)]
    values += [rb":0\r\n"] * 5
    body = b"".join(rb"\$%d\r\n%s\r\n%s" % (len(k), k, v) for k, v in zip(FIELDS, values, strict=True))
    return re.compile(rb"\*32\r\n" + body), re.compile(rb"%16\r\n" + body)


PION_SECTION = re.compile(
    rb"[$=]\d+\r\n(txt:)?# Pion\r\nstats_scope:worker\r\nworker_id:0\r\nkvprefix_hits:1\r\nkvprefix_misses:1\r\n"
    rb"kvprefix_hits_measured:0\r\nkvprefix_tokens_served:1\r\nkvprefix_bytes_served:2\r\n"
    rb"prefill_seconds_avoided:0\.000\r\nprefill_seconds_avoided_measured:0\.000\r\nsemantic_hits:0\r\n"
    rb"semantic_misses:0\r\nmoe_hits:0\r\nmoe_misses:0\r\nvector_queries:0\r\n(?s:.*)\r\n"
)

CASES = [
    # §7 ---------------------------------------------------------------------------------------------------
    case(
        "ssm: store, overwrite, fetch, drop",
        "7",
        (b"*3\r\n$16\r\nSSM.PREFIX.FETCH\r\n$2\r\nh1\r\n$1\r\n0\r\n", NIL),
        (b"*4\r\n$16\r\nSSM.PREFIX.STORE\r\n$2\r\nh1\r\n$1\r\n0\r\n$5\r\na\r\n\x00b\r\n", OK),
        (cmd("SSM.PREFIX.FETCH h1 0"), b"$5\r\na\r\n\x00b\r\n"),
        (cmd("SSM.PREFIX.STORE h1 0 %", b""), OK),
        (cmd("SSM.PREFIX.FETCH h1 0"), b"$0\r\n\r\n"),
        (cmd("SSM.PREFIX.STORE h1 300 three"), OK),
        (cmd("ssm.prefix.store h1 7 seven"), OK),
        (cmd("SSM.PREFIX.FETCH h1 300"), b"$5\r\nthree\r\n"),
        (cmd("SSM.PREFIX.FETCH h1 1"), NIL),
        (cmd("SSM.PREFIX.DROP h1 7"), OK),
        (cmd("SSM.PREFIX.FETCH h1 7"), NIL),
        (cmd("SSM.PREFIX.FETCH h1 300"), b"$5\r\nthree\r\n"),
        (cmd("SSM.PREFIX.DROP h1 7"), OK),  # idempotent
        (cmd("SSM.PREFIX.DROP h1"), OK),
        (cmd("SSM.PREFIX.FETCH h1 0"), NIL),
        (cmd("SSM.PREFIX.FETCH h1 300"), NIL),
        (cmd("SSM.PREFIX.DROP nobody"), OK),
    ),
    case(
        "ssm: the state of a registered prefix goes with it",
        "7, design 2",
        (cmd("KV.PREFIX.REGISTER h2 1 fp16"), OK),
        (cmd("SSM.PREFIX.STORE h2 0 state"), OK),
        (cmd("SSM.PREFIX.FETCH h2 0"), bulk(b"state")),
        (cmd("KV.PREFIX.LOOKUP h2"), HIT),
        (cmd("KV.PREFIX.DROP h2"), b":1\r\n"),
        (cmd("SSM.PREFIX.FETCH h2 0"), NIL),
    ),
    errors(
        "ssm refusals",
        "7",
        (cmd("SSM.PREFIX.STORE h3 0"), "ERR SSM.PREFIX.STORE requires: session_id layer_id state_blob"),
        (cmd("SSM.PREFIX.STORE h3 -1 x"), "ERR invalid layer_id (must be >= 0)"),
        (cmd("SSM.PREFIX.STORE h3 x x"), NOT_INT),
        (cmd("SSM.PREFIX.FETCH h3"), "ERR SSM.PREFIX.FETCH requires: session_id layer_id"),
        (cmd("SSM.PREFIX.FETCH h3 -1"), "ERR invalid layer_id (must be >= 0)"),
        (cmd("SSM.PREFIX.FETCH h3 x"), NOT_INT),
        (cmd("SSM.PREFIX.DROP"), "ERR SSM.PREFIX.DROP requires: session_id [layer_id]"),
        (cmd("SSM.PREFIX.DROP h3 -1"), "ERR layer_id must be >= 0 (omit to drop all)"),
        (cmd("SSM.PREFIX.DROP h3 x"), NOT_INT),
    ),
    # §8 ---------------------------------------------------------------------------------------------------
    case(
        "stats: the receipt, and its reset",
        "8",
        (cmd("PION.STATS"), stats(0, 0, 0, 0, 0, 0, 0, saved=b"0.000", measured=b"0.000")),
        (cmd("KV.PREFIX.LOOKUP t1"), MISS),
        (cmd("KV.PREFIX.REGISTER t1 1 fp16"), OK),
        (cmd("V.STOREBATCH t1_pk 0 0 3 % FMT F16", f16(1.0, 2.0, 3.0)), OK),
        # a hit without a reported prefill: tokens of layer 0 of the K side, 555 us each
        (cmd("KV.PREFIX.LOOKUP t1"), HIT),
        (cmd("PION.STATS"), stats(1, 1, 0, 3, 0, 1665, 0, saved=b"0.001", measured=b"0.000")),
        # PREFILL_MS alone replaces the time
        (cmd("KV.PREFIX.LOOKUP t1 PREFILL_MS 7"), HIT),
        (cmd("PION.STATS"), stats(2, 1, 1, 6, 0, 8665, 7000, saved=b"0.008", measured=b"0.007")),
        # TOKENS credits the named number, and without PREFILL_MS the estimate
        (cmd("KV.PREFIX.LOOKUP t1 TOKENS 10 TOKENS 100"), HIT),
        (cmd("PION.STATS"), stats(3, 1, 1, 106, 0, 64165, 7000, saved=b"0.064", measured=b"0.007")),
        (cmd("KV.PREFIX.LOOKUP t1 PREFILL_MS 1000 TOKENS 1"), HIT),
        (cmd("PION.STATS"), stats(4, 1, 2, 107, 0, 1064165, 1007000, saved=b"1.064", measured=b"1.007")),
        # payload bytes of fetches, nil adds none
        (cmd("V.FETCH t1_pk 0 RANGE 0 3"), bulk(f32(1.0, 2.0, 3.0))),
        (cmd("V.FETCH t1_pk 0 RANGE 0 4 FMT NATIVE"), bulk(f16(1.0, 2.0, 3.0, 0.0))),
        (cmd("V.FETCH t1_pk 0 0"), bulk(f32(1.0))),
        (cmd("V.FETCH t1_pv 0 RANGE 0 1"), NIL),
        (cmd("PION.STATS other"), stats(4, 1, 2, 107, 24, 1064165, 1007000, saved=b"1.064", measured=b"1.007")),
        (cmd("PION.STATS reset"), OK),
        (cmd("PION.STATS"), stats(0, 0, 0, 0, 0, 0, 0, saved=b"0.000", measured=b"0.000")),
        fresh=True,
    ),
    case(
        "stats: a registered PREFILL_MS is credited exactly",
        "4.1 4.2 8",
        (cmd("KV.PREFIX.REGISTER t2 1 fp16 PREFILL_MS 1218"), OK),
        (cmd("KV.PREFIX.LOOKUP t2"), HIT),
        (cmd("PION.STATS"), stats(1, 0, 1, 0, 0, 1218000, 1218000, saved=b"1.218", measured=b"1.218")),
        # with TOKENS the registered time is not used
        (cmd("KV.PREFIX.LOOKUP t2 TOKENS 2"), HIT),
        (cmd("PION.STATS"), stats(2, 0, 1, 2, 0, 1219110, 1218000, saved=b"1.219", measured=b"1.218")),
        # PREFILL_MS 0 does not replace it
        (cmd("KV.PREFIX.LOOKUP t2 PREFILL_MS 0"), HIT),
        (cmd("PION.STATS"), stats(3, 0, 2, 2, 0, 2437110, 2436000, saved=b"2.437", measured=b"2.436")),
        # registered again without it: absent means 0
        (cmd("KV.PREFIX.REGISTER t2 1 fp16"), OK),
        (cmd("KV.PREFIX.LOOKUP t2"), HIT),
        (cmd("PION.STATS"), stats(4, 0, 2, 2, 0, 2437110, 2436000, saved=b"2.437", measured=b"2.436")),
        # refused options record nothing
        (cmd("KV.PREFIX.LOOKUP t2 TOKENS"), b"-ERR KV.PREFIX.LOOKUP option needs a value\r\n"),
        (cmd("PION.STATS"), stats(4, 0, 2, 2, 0, 2437110, 2436000, saved=b"2.437", measured=b"2.436")),
        fresh=True,
    ),
    case(
        "INFO pion carries the receipt",
        "8",
        (cmd("KV.PREFIX.LOOKUP t3"), MISS),
        (cmd("KV.PREFIX.REGISTER t3 1 fp16"), OK),
        (cmd("V.STOREBATCH t3_pk 0 0 1 % FMT F16", f16(1.0)), OK),
        (cmd("KV.PREFIX.LOOKUP t3"), HIT),
        (cmd("V.FETCH t3_pk 0 RANGE 0 1 FMT NATIVE"), bulk(f16(1.0))),
        (cmd("INFO pion"), PION_SECTION),
        fresh=True,
    ),
]
