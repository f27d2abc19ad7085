"""Golden bytes of ATTEND.PREFIX.* (wire §5) and of KV.PREFIX.WARM (§4.5).

One key answers its value, equal keys the mean of their values: exact in any order of summation.
"""

from __future__ import annotations

from tests.golden.kit import OK, bulk, case, cmd, err, errors, f16, f32

HIT, MISS, COLD = b"+HIT\r\n", b"+MISS\r\n", b"+COLD\r\n"
OFF = ("--attention", "off")
LN2 = b"\x18\x72\x31\x3f"
NO_ENGINE = "ERR attention engine not available (start with --metal-attention or --cuda-attention)"
NO_METAL = "ERR Metal attention not available (start with --metal-attention)"
COLDMISS = "COLDMISS session evicted to cold tier (call KV.PREFIX.WARM)"


def row(value: float) -> bytes:
    """Eight equal floats: the smallest head."""
    return f32(*[value] * 8)


def _row(word: bytes) -> bytes:
    """The same of a float's bytes: 1.75 is 3fe00000, 2.5 is 40200000, 0.25 is 3e800000."""
    return word * 8


_I32 = {number: bytes([number, 0, 0, 0]) for number in range(4)}

CASES = [
    case(
        "store, look up, query, drop",
        "5.1 5.2",
        (cmd("ATTEND.PREFIX.LOOKUP a1 0"), MISS),
        (cmd("ATTEND.PREFIX.STORE a1 0 1 2 8 % %", row(1.0) * 2, row(1.0) + row(2.0)), OK),
        (cmd("attend.prefix.lookup a1 0"), HIT),
        (cmd("ATTEND.PREFIX.LOOKUP a1 1"), MISS),
        (cmd("ATTEND.PREFIX.QUERY a1 0 1 8 1 %", row(0.5)), bulk(row(1.5))),
        # more than one query a head: the lse behind the output
        (cmd("ATTEND.PREFIX.QUERY a1 0 1 8 1 %", row(0.0) * 2), bulk(row(1.5) * 2 + LN2 * 2)),
        # fa_window: the last position; all of them; the engine's own
        (cmd("ATTEND.PREFIX.QUERY a1 0 1 8 1 % 1", row(0.5)), bulk(row(2.0))),
        (cmd("ATTEND.PREFIX.QUERY a1 0 1 8 1 % 0", row(0.5)), bulk(row(1.5))),
        (cmd("ATTEND.PREFIX.QUERY a1 0 1 8 1 % -1", row(0.5)), bulk(row(1.5))),
        # a store replaces
        (cmd("ATTEND.PREFIX.STORE a1 0 1 1 8 % %", row(1.0), row(3.0)), OK),
        (cmd("ATTEND.PREFIX.QUERY a1 0 1 8 1 %", row(0.5)), bulk(row(3.0))),
        (cmd("ATTEND.PREFIX.INFO a1"), bulk(b"layer_0:HIT,heads=1,rows=1,head_dim=8\r\n")),
        (cmd("ATTEND.PREFIX.DROP a1 nobody"), b":1\r\n"),
        (cmd("ATTEND.PREFIX.DROP a1"), b":0\r\n"),
        (cmd("ATTEND.PREFIX.LOOKUP a1 0"), MISS),
        (cmd("ATTEND.PREFIX.INFO a1"), err("ERR session not found")),
        (
            cmd("ATTEND.PREFIX.QUERY a1 0 1 8 1 %", row(0.5)),
            err("ERR ATTEND.PREFIX.QUERY failed (session not found, or unsupported D)"),
        ),
    ),
    case(
        "prefix and suffix in one softmax",
        "5.4",
        (cmd("ATTEND.PREFIX.STORE a2 3 1 1 8 % %", row(1.0), row(1.0)), OK),
        # two heads read one head of K/V; no suffix
        (cmd("ATTEND.PREFIX.QUERY_FUSED a2 3 2 8 0 1 % % % %", row(0.0) * 2, b"", b"", b"\0\0"), bulk(row(1.0) * 2)),
        # one suffix key, as good as the stored one
        (
            cmd("ATTEND.PREFIX.QUERY_FUSED a2 3 1 8 1 1 % % % %", row(0.5), row(1.0), row(2.0), b"\0"),
            bulk(row(1.5)),
        ),
        # causal: with two rows and two suffix keys the first row sees one of them
        (
            cmd(
                "ATTEND.PREFIX.QUERY_FUSED a2 3 1 8 2 1 % % % %",
                row(0.0) * 2,
                row(1.0) * 2,
                row(2.0) + row(3.0),
                b"\0",
            ),
            bulk(row(1.5) + row(2.0)),
        ),
        (cmd("ATTEND.PREFIX.DROP a2"), b":1\r\n"),
    ),
    case(
        "sparse queries",
        "5.5 5.6 5.7",
        (
            cmd("ATTEND.PREFIX.STORE a3 0 1 4 8 % %", row(1.0) * 4, row(0.5) + row(1.0) + row(2.0) + row(3.0)),
            OK,
        ),
        # positions 1 and 2; the third index does not count
        (
            cmd("ATTEND.PREFIX.QUERY_SPARSE a3 0 1 8 3 % % %", row(0.5), _I32[1] + _I32[2] + _I32[0], _I32[2]),
            bulk(row(1.5)),
        ),
        # equal blocks: the first, and always the last
        (cmd("ATTEND.PREFIX.QUERY_SPARSE_AUTO a3 0 1 8 1 1 1 % %", row(0.0), b""), bulk(_row(b"\x00\x00\xe0\x3f"))),
        (cmd("ATTEND.PREFIX.QUERY_SPARSE_AUTO a3 0 1 8 1 1 1 % % -1 1", row(0.0), b"\0"), bulk(_row(b"\0\0\xe0\x3f"))),
        # all blocks, of which a window leaves two
        (cmd("ATTEND.PREFIX.QUERY_SPARSE_AUTO a3 0 1 8 1 9 1 % % 2", row(0.0), b""), bulk(_row(b"\x00\x00\x20\x40"))),
        (
            cmd("ATTEND.PREFIX.QUERY_SPARSE_AUTO_FUSED a3 0 1 8 1 9 1 1 % % % % 1", row(0.0), row(1.0), row(0.0), b""),
            bulk(row(1.5)),
        ),
        (
            cmd("ATTEND.PREFIX.QUERY_SPARSE a3 0 1 8 1 % % % WITHMASS", row(0.0), _I32[3], _I32[1]),
            b"*2\r\n" + bulk(row(3.0)) + bulk(b"\x00\x00\x80\x3e"),
        ),
        (cmd("ATTEND.PREFIX.DROP a3"), b":1\r\n"),
    ),
    case(
        "cold layers",
        "5.8",
        (cmd("ATTEND.PREFIX.STORE a4 0 1 1 8 % %", row(1.0), row(1.0)), OK),
        (cmd("ATTEND.PREFIX.STORE a4 1 1 1 8 % %", row(1.0), row(2.0)), OK),
        (cmd("ATTEND.PREFIX.LOOKUP a4 0"), COLD),
        (cmd("ATTEND.PREFIX.LOOKUP a4 1"), HIT),
        (cmd("ATTEND.PREFIX.QUERY a4 0 1 8 1 %", row(0.5)), err(COLDMISS)),
        (cmd("ATTEND.PREFIX.QUERY_FUSED a4 0 1 8 0 1 x x x x"), err(COLDMISS)),
        (cmd("ATTEND.PREFIX.QUERY_SPARSE a4 0 1 8 1 x x x"), err(COLDMISS)),
        (cmd("ATTEND.PREFIX.QUERY_SPARSE_AUTO a4 0 1 8 1 1 1 x x"), err(COLDMISS)),
        (cmd("ATTEND.PREFIX.QUERY_SPARSE_AUTO_FUSED a4 0 1 8 1 1 1 0 x x x x"), err(COLDMISS)),
        (cmd("ATTEND.PREFIX.STORE a4 0 1 1 8 % %", row(1.0), row(1.0)), OK),
        (cmd("ATTEND.PREFIX.LOOKUP a4 0"), HIT),
        (cmd("ATTEND.PREFIX.LOOKUP a4 1"), COLD),
        flags=("--attend-warm-slots", "1"),
    ),
    case(
        "warm only what is whole, and what is meant",
        "4.5",
        (cmd("KV.PREFIX.REGISTER ax 8 fp16 ROWS 1 LAYERS 2 DIGEST AB"), OK),
        (cmd("KV.PREFIX.WARM ax 1 8"), err("ERR KV.PREFIX.WARM: the prefix is not complete (layer 0)")),
        (cmd("V.STOREBATCH ax_pk 0 0 1 % FMT F16", f16(*[1.0] * 8)), OK),
        (cmd("V.STOREBATCH ax_pv 0 0 1 % FMT F16", f16(*[1.0] * 8)), OK),
        (cmd("V.STOREBATCH ax_pk 1 0 1 % FMT F16", f16(*[1.0] * 8)), OK),
        (cmd("KV.PREFIX.WARM ax 1 8"), err("ERR KV.PREFIX.WARM: the prefix is not complete (layer 1)")),
        (cmd("ATTEND.PREFIX.LOOKUP ax 0"), b"+MISS\r\n"),
        (cmd("V.STOREBATCH ax_pv 1 0 1 % FMT F16", f16(*[1.0] * 8)), OK),
        (
            cmd("KV.PREFIX.WARM ax 1 8 ax_attn DIGEST CD"),
            err("MISMATCH KV.PREFIX.WARM: digest ab is stored, not cd"),
        ),
        (cmd("ATTEND.PREFIX.LOOKUP ax_attn 0"), b"+MISS\r\n"),
        (cmd("KV.PREFIX.WARM ax 1 8 ax_attn DIGEST AB"), b"+2\r\n"),
        (
            cmd("KV.PREFIX.WARM ax 1 8 ax_attn DIGEST"),
            err("ERR KV.PREFIX.WARM: unknown option (expected DIGEST hex behind the session)"),
        ),
        (cmd("KV.PREFIX.DROP ax"), b":1\r\n"),
    ),
    case(
        "warm",
        "4.5",
        (cmd("KV.PREFIX.REGISTER aw 16 fp16"), OK),
        (cmd("KV.PREFIX.WARM aw 2 8"), b"+0\r\n"),
        (cmd("V.STOREBATCH aw_pk 0 0 1 % FMT F16", f16(*[1.0] * 16)), OK),
        (cmd("V.STOREBATCH aw_pv 0 0 1 % FMT F16", f16(*[2.0] * 8, *[3.0] * 8)), OK),
        (cmd("KV.PREFIX.WARM aw 2 8 aw_attn"), b"+1\r\n"),
        (cmd("ATTEND.PREFIX.QUERY aw_attn 0 2 8 1 %", row(0.5) * 2), bulk(row(2.0) + row(3.0))),
        (cmd("KV.PREFIX.WARM aw 1 8"), b"+1\r\n"),  # design §6: as many heads as fit
        (cmd("ATTEND.PREFIX.INFO aw"), bulk(b"layer_0:HIT,heads=2,rows=1,head_dim=8\r\n")),
        (cmd("KV.PREFIX.WARM aw 1 24"), b"+0 skipped_dim=1\r\n"),
        (cmd("KV.PREFIX.WARM aw 4 4"), b"+0\r\n"),  # no head size
        (cmd("ATTEND.PREFIX.DROP aw aw_attn"), b":2\r\n"),
        (cmd("KV.PREFIX.DROP aw"), b":1\r\n"),
    ),
    errors(
        "warm refusals",
        "4.5",
        (cmd("KV.PREFIX.WARM w2 1"), "ERR KV.PREFIX.WARM requires: ns_key H D"),
        (cmd("KV.PREFIX.WARM w2 0 64"), "ERR invalid H/D (1..256 / 1..512)"),
        (cmd("KV.PREFIX.WARM w2 1 513"), "ERR invalid H/D (1..256 / 1..512)"),
        (
            cmd("KV.PREFIX.WARM w2 1 64"),
            "ERR KV.PREFIX.WARM namespace not registered (call KV.PREFIX.REGISTER first)",
        ),
    ),
    errors(
        "without an attention engine",
        "4.5 5",
        (cmd("KV.PREFIX.WARM w1 1"), "ERR KV.PREFIX.WARM requires: ns_key H D"),
        (cmd("KV.PREFIX.WARM w1 1 64"), NO_METAL),
        *[(cmd(f"ATTEND.PREFIX.{name} s 0"), NO_ENGINE) for name in ("STORE", "QUERY", "QUERY_SPARSE_AUTO")],
        *[
            (cmd(f"ATTEND.PREFIX.{name} s 0"), NO_METAL)
            for name in ("LOOKUP", "QUERY_FUSED", "QUERY_SPARSE", "QUERY_SPARSE_AUTO_FUSED", "DROP", "INFO")
        ],
        setup=(cmd("KV.PREFIX.REGISTER w1 64 fp16"),),
        flags=OFF,
    ),
]
