"""Golden bytes of V.CREATE and V.STOREBATCH (wire §1.1 to §1.3)."""

from __future__ import annotations

import re

from tests.golden.kit import INT, NIL, NOT_INT, OK, bf16, bulk, case, cmd, err, errors, f16, f32, lines, praw

CREATE_ARGS = (
    "ERR V.CREATE requires: session_id value_dim [VQUANT fmt] OR sid [default_dim] SCHEMA N spec_0 ... spec_{N-1}"
)
STORE_ARGS = "ERR V.STOREBATCH requires: session_id layer_id start_id count values_blob"
STORE_OPTION = "ERR V.STOREBATCH: unknown option (expected FMT F16)"
WANT = "(want int8|turbo4|turbo3|turbo2|fp16|fp8|mlx4g32), or bf16|fp32"  # the published text, and ours

CASES = [
    # §1.1 -------------------------------------------------------------------------------------------------
    case(
        "create answers the slot index and is idempotent",
        "1.1",
        (b"*3\r\n$8\r\nV.CREATE\r\n$3\r\none\r\n$1\r\n4\r\n", b":0\r\n"),
        (b"*5\r\n$8\r\nV.CREATE\r\n$3\r\ntwo\r\n$1\r\n8\r\n$6\r\nVQUANT\r\n$4\r\nfp16\r\n", b":1\r\n"),
        (b"*3\r\n$8\r\nv.create\r\n$3\r\none\r\n$2\r\n16\r\n", b":0\r\n"),
        (
            cmd("V.INFO one"),
            lines("session_idx:0", "value_dim:4", "v_format:int8", "num_layers:0", "schema:uniform", "total_tokens:0"),
        ),
        (
            cmd("V.INFO two"),
            lines("session_idx:1", "value_dim:8", "v_format:fp16", "num_layers:0", "schema:uniform", "total_tokens:0"),
        ),
        fresh=True,
    ),
    errors(
        "create refusals",
        "1.1",
        (cmd("V.CREATE"), CREATE_ARGS),
        (cmd("V.CREATE c1"), CREATE_ARGS),
        (cmd("V.CREATE c1 0"), "ERR invalid value_dim (must be 1-8192)"),
        (cmd("V.CREATE c1 8193"), "ERR invalid value_dim (must be 1-8192)"),
        (cmd("V.CREATE c1 -4"), "ERR invalid value_dim (must be 1-8192)"),
        (cmd("V.CREATE c1 wide"), "ERR invalid value_dim (must be 1-8192)"),
        (cmd("V.CREATE c1 4 VQUANT FP99"), f"ERR V.CREATE: unknown VQUANT format 'fp99' {WANT}"),
        (
            cmd("V.CREATE c1 64 VQUANT bf16_rope_fp8_body"),
            "ERR V.CREATE: bf16_rope_fp8_body requires SCHEMA form with per-layer rope=N",
        ),
        (cmd("V.INFO c1"), "ERR session not found"),
    ),
    errors(
        "rows a format does not take are refused, never stored in another one",
        "design 6",
        (cmd("V.CREATE c2 100 VQUANT mlx4g32"), "ERR format mlx4g32 takes rows of multiples of 32 values, not 100"),
        (cmd("V.INFO c2"), "ERR session not found"),
    ),
    case(
        "every published format, of any dimension",
        "1.1, design 6",
        *[
            step
            for fmt, dim in (("turbo4", 33), ("turbo3", 100), ("turbo2", 1), ("fp8", 33), ("mlx4g32", 64), ("int8", 7))
            for step in (
                (cmd(f"V.CREATE c5-{fmt} {dim} VQUANT {fmt.upper()}"), INT),
                (cmd(f"V.STOREBATCH c5-{fmt} 0 0 2 %", bytes(8 * dim)), OK),
                # zeros of either sign
                (
                    cmd(f"V.FETCH c5-{fmt} 0 RANGE 0 2 FMT NATIVE"),
                    re.compile(rb"\$%d\r\n(\x00\x00\x00[\x00\x80]){%d}\r\n" % (8 * dim, 2 * dim)),
                ),
                (
                    cmd(f"V.INFO c5-{fmt}"),
                    re.compile(
                        rb"\$\d+\r\nsession_idx:\d+\r\nvalue_dim:%d\r\nv_format:%s\r\nnum_layers:1\r\n"
                        rb"schema:uniform\r\nlayer_0_tokens:2\r\ntotal_tokens:2\r\n\r\n" % (dim, fmt.encode())
                    ),
                ),
            )
        ],
    ),
    case(
        "bf16_rope_fp8_body by schema: the leading values are bf16, the rest fp8 of groups of 32",
        "1.2 2.2",
        (cmd("V.CREATE c6 0 SCHEMA 1 fmt=bf16_rope_fp8_body,dim=33,rope=1"), INT),
        (cmd("V.STOREBATCH c6 0 0 1 %", f32(1.5) + bytes(128)), OK),
        (cmd("V.FETCH c6 0 RANGE 0 1"), bulk(f32(1.5) + bytes(128))),
        (
            cmd("V.FETCH c6 0 RANGE 0 1 FMT RAW"),
            re.compile(
                rb"\$100\r\n%b\xc0\x3f\x00{32}..\r\n" % re.escape(praw(33, 0, 1, (6, 0, 1, 0, 1, 36))), re.DOTALL
            ),
        ),
        (
            cmd("V.INFO c6"),
            re.compile(
                rb"\$\d+\r\nsession_idx:\d+\r\nvalue_dim:33\r\nv_format:bf16_rope_fp8_body\r\nnum_layers:1\r\n"
                rb"schema:uniform\r\nlayer_0_tokens:1\r\ntotal_tokens:1\r\n\r\n"
            ),
        ),
    ),
    case(
        "create skips other tokens and takes permissive integers",
        "1.1",
        (cmd("V.CREATE c3 +4 OTHER VQUANT FP16 MORE"), INT),
        (
            cmd("V.INFO c3"),
            re.compile(
                rb"\$\d+\r\nsession_idx:\d+\r\nvalue_dim:4\r\nv_format:fp16\r\nnum_layers:0\r\n"
                rb"schema:uniform\r\ntotal_tokens:0\r\n\r\n"
            ),
        ),
    ),
    # §1.2 -------------------------------------------------------------------------------------------------
    errors(
        "schema refusals come before the version's",
        "1.2",
        (cmd("V.CREATE s1 -1 SCHEMA 1 fmt=fp16"), "ERR V.CREATE SCHEMA: default_dim must be 0-8192"),
        (cmd("V.CREATE s1 8193 SCHEMA 1 fmt=fp16"), "ERR V.CREATE SCHEMA: default_dim must be 0-8192"),
        (cmd("V.CREATE s1 SCHEMA"), "ERR V.CREATE SCHEMA requires N (layer count)"),
        (cmd("V.CREATE s1 64 SCHEMA"), "ERR V.CREATE SCHEMA requires N (layer count)"),
        (cmd("V.CREATE s1 SCHEMA x"), NOT_INT),
        (cmd("V.CREATE s1 SCHEMA 0"), "ERR V.CREATE SCHEMA: N must be positive"),
        (cmd("V.CREATE s1 SCHEMA -3"), "ERR V.CREATE SCHEMA: N must be positive"),
        (
            cmd("V.CREATE s1 SCHEMA 60"),
            "ERR V.CREATE SCHEMA: N exceeds 59; split into multiple sessions or wait for V.CREATE.SCHEMA.APPEND",
        ),
        (cmd("V.CREATE s1 64 SCHEMA 2 fmt=fp16"), "ERR V.CREATE SCHEMA: not enough layer specs (need 2)"),
        (cmd("V.CREATE s1 64 SCHEMA 1 fmt=fp99"), "ERR V.CREATE SCHEMA: layer 0 unknown fmt"),
        (cmd("V.CREATE s1 64 SCHEMA 2 fmt=fp16 dim=0"), "ERR V.CREATE SCHEMA: layer 1 dim must be 1-8192"),
        (cmd("V.CREATE s1 64 SCHEMA 1 dim=8193"), "ERR V.CREATE SCHEMA: layer 0 dim must be 1-8192"),
        (cmd("V.CREATE s1 64 SCHEMA 1 rope=0"), "ERR V.CREATE SCHEMA: layer 0 rope must be 1-8192"),
        (cmd("V.CREATE s1 64 SCHEMA 1 size=4"), "ERR V.CREATE SCHEMA: layer 0 unknown key"),
        (cmd("V.CREATE s1 0 SCHEMA 1 fmt=fp16"), "ERR V.CREATE SCHEMA: layer 0 missing dim and no default supplied"),
        (
            cmd("V.CREATE s1 SCHEMA 1 fmt=bf16_rope_fp8_body,dim=64"),
            "ERR V.CREATE SCHEMA: layer 0 bf16_rope_fp8_body needs rope=N (0 < N < dim)",
        ),
        (
            cmd("V.CREATE s1 SCHEMA 1 fmt=bf16_rope_fp8_body,dim=64,rope=64"),
            "ERR V.CREATE SCHEMA: layer 0 bf16_rope_fp8_body needs rope=N (0 < N < dim)",
        ),
        (
            cmd("V.CREATE s1 SCHEMA 1 fmt=bf16_rope_fp8_body,dim=64,rope=16"),
            "ERR V.CREATE SCHEMA: layer 0 bf16_rope_fp8_body body (dim - rope) must be multiple of 32",
        ),
        (
            cmd("V.CREATE s1 64 SCHEMA 1 s=1"),
            "ERR V.CREATE SCHEMA: S-tensor reserved (route SSM/SWA-tail state through STATE.*)",
        ),
        (cmd("V.INFO s1"), "ERR session not found"),
    ),
    case(
        "a schema gives each layer its dimension and format",
        "1.2 1.5",
        (cmd("V.CREATE hs1 4 SCHEMA 3 FMT=FP16 fmt=fp32,dim=2 dim=8,fmt=bf16,dim=1"), b":0\r\n"),
        (cmd("V.CREATE hs1 4 SCHEMA 3 fmt=fp16 fmt=fp32,dim=2 fmt=bf16,dim=1"), b":0\r\n"),
        (cmd("V.CREATE hs1 8"), b":0\r\n"),
        (
            cmd("V.INFO hs1"),
            lines(
                "session_idx:0",
                "value_dim:4",
                "v_format:fp16",
                "num_layers:3",
                "schema:heterogeneous",
                "layer_0_dim:4",
                "layer_0_fmt:fp16",
                "layer_1_dim:2",
                "layer_1_fmt:fp32",
                "layer_2_dim:1",
                "layer_2_fmt:bf16",
                "total_tokens:0",
            ),
        ),
        (cmd("V.FETCH hs1 BATCH 0 1"), (b"*3\r\n" + NIL[0] * 3, b"*3\r\n" + NIL[1] * 3)),
        (cmd("V.STOREBATCH hs1 0 0 1 % FMT F16", f16(1.0, 2.0, 3.0, 0.5)), OK),
        (cmd("V.STOREBATCH hs1 1 0 2 %", f32(1.0, 2.0, -1.5, 0.5)), OK),
        (cmd("V.STOREBATCH hs1 2 0 1 % FMT BF16", bf16(-1.5)), OK),
        (
            cmd("V.STOREBATCH hs1 2 1 1 %", f32(1.0, 2.0, 3.0, 0.5)),
            err("ERR V.STOREBATCH: blob size 16 != expected 4 (count=1 \u00d7 per_layer_dim=1 \u00d7 4)"),
        ),
        # layers the schema does not name take its default dimension, and int8
        (cmd("V.STOREBATCH hs1 3 0 1 %", f32(1.5, 1.5, 1.5, 1.5)), OK),
        (
            cmd("V.FETCH hs1 BATCH 0 1 FMT NATIVE"),
            b"*4\r\n"
            + bulk(f16(1.0, 2.0, 3.0, 0.5))
            + bulk(f32(1.0, 2.0))
            + bulk(f32(-1.5))
            + bulk(f32(1.5, 1.5, 1.5, 1.5)),
        ),
        (cmd("V.FETCH hs1 1 1 0"), bulk(f32(-1.5, 0.5, 1.0, 2.0))),
        (cmd("V.FETCH hs1 2 RANGE 0 1 FMT RAW"), bulk(praw(1, 0, 1, (9, 0, 0, 0, 1, 2)) + bf16(-1.5))),
        (
            cmd("V.INFO hs1"),
            lines(
                "session_idx:0",
                "value_dim:4",
                "v_format:fp16",
                "num_layers:4",
                "schema:heterogeneous",
                "layer_0_tokens:1",
                "layer_0_dim:4",
                "layer_0_fmt:fp16",
                "layer_1_tokens:2",
                "layer_1_dim:2",
                "layer_1_fmt:fp32",
                "layer_2_tokens:1",
                "layer_2_dim:1",
                "layer_2_fmt:bf16",
                "layer_3_tokens:1",
                "layer_3_dim:4",
                "layer_3_fmt:int8",
                "total_tokens:5",
            ),
        ),
        (cmd("V.CREATE hs1 4 SCHEMA 1 fmt=fp16"), err("MISMATCH the session is there with another schema")),
        (
            cmd("V.CREATE hs1 4 SCHEMA 3 fmt=fp16 fmt=bf16,dim=2 fmt=bf16,dim=1"),
            err("MISMATCH the session is there with another schema"),
        ),
        fresh=True,
    ),
    case(
        "a schema of equal layers is uniform; without a default it has no further layers",
        "1.2 1.5",
        (cmd("V.CREATE hs2_pv 0 SCHEMA 2 fmt=fp16,dim=2 fmt=fp16,dim=2"), INT),
        (
            cmd("V.INFO hs2_pv"),
            re.compile(
                rb"\$\d+\r\nsession_idx:\d+\r\nvalue_dim:2\r\nv_format:fp16\r\nnum_layers:2\r\n"
                rb"schema:uniform\r\ntotal_tokens:0\r\n\r\n"
            ),
        ),
        (
            cmd("V.STOREBATCH hs2_pv 2 0 1 %", f32(1.0, 2.0)),
            err("ERR V.STOREBATCH: layer 2 is not among those of the schema"),
        ),
    ),
    # §1.3 -------------------------------------------------------------------------------------------------
    case(
        "storebatch fp32 into fp16, fetched as fp32 and native",
        "1.3 1.4",
        (cmd("V.CREATE b1 2 VQUANT fp16"), INT),
        (
            b"*6\r\n$12\r\nV.STOREBATCH\r\n$2\r\nb1\r\n$1\r\n0\r\n$1\r\n0\r\n$1\r\n2\r\n$16\r\n"
            b"\x00\x00\x80\x3f\x00\x00\x00\x40\x00\x00\xc0\xbf\x00\x00\x00\x3f\r\n",
            OK,
        ),
        (
            b"*6\r\n$7\r\nV.FETCH\r\n$2\r\nb1\r\n$1\r\n0\r\n$5\r\nRANGE\r\n$1\r\n0\r\n$1\r\n2\r\n",
            b"$16\r\n\x00\x00\x80\x3f\x00\x00\x00\x40\x00\x00\xc0\xbf\x00\x00\x00\x3f\r\n",
        ),
        (cmd("V.FETCH b1 0 RANGE 0 2 FMT NATIVE"), b"$8\r\n\x00\x3c\x00\x40\x00\xbe\x00\x38\r\n"),
        (cmd("v.fetch b1 0 range 1 2 fmt native"), b"$4\r\n\x00\xbe\x00\x38\r\n"),
        (cmd("V.FETCH b1 0 1 0"), bulk(f32(-1.5, 0.5, 1.0, 2.0))),
        (cmd("V.FETCH b1 0 1 1"), bulk(f32(-1.5, 0.5, -1.5, 0.5))),
    ),
    case(
        "storebatch FMT F16 keeps every word, subnormals, infinities and NaN included",
        "1.3",
        (cmd("V.CREATE b2 4 VQUANT fp16"), INT),
        (cmd("V.STOREBATCH b2 0 0 1 % FMT F16", b"\x01\x00\x00\x7c\x00\xfc\xff\x03"), OK),
        (cmd("V.STOREBATCH b2 0 1 1 % fmt f16", b"\x01\x7e\x00\x80\xff\x7b\x01\x7c"), OK),
        (
            cmd("V.FETCH b2 0 RANGE 0 2 FMT NATIVE"),
            b"$16\r\n\x01\x00\x00\x7c\x00\xfc\xff\x03\x01\x7e\x00\x80\xff\x7b\x01\x7c\r\n",
        ),
        # 2^-24, +inf, -inf, 1023 * 2^-24
        (cmd("V.FETCH b2 0 RANGE 0 1"), b"$16\r\n\x00\x00\x80\x33\x00\x00\x80\x7f\x00\x00\x80\xff\x00\xc0\x7f\x38\r\n"),
    ),
    case(
        "fp32, bf16 and int8 sessions",
        "design 6",
        (cmd("V.CREATE b3 2 VQUANT fp32"), INT),
        (cmd("V.STOREBATCH b3 0 0 1 % FMT F32", b"\x01\x00\x80\x3f\x00\x50\xc3\x47"), OK),
        (cmd("V.FETCH b3 0 RANGE 0 1 FMT NATIVE"), b"$8\r\n\x01\x00\x80\x3f\x00\x50\xc3\x47\r\n"),
        (cmd("V.CREATE b4 4 VQUANT bf16"), INT),
        (cmd("V.STOREBATCH b4 0 0 1 % FMT BF16", bf16(1.0, 2.0, -1.5, 0.5)), OK),
        (cmd("V.FETCH b4 0 RANGE 0 1"), bulk(f32(1.0, 2.0, -1.5, 0.5))),
        # §1.4: FMT NATIVE is answered in FP32 by every format but fp16
        (cmd("V.FETCH b4 0 RANGE 0 1 FMT NATIVE"), bulk(f32(1.0, 2.0, -1.5, 0.5))),
        (cmd("V.CREATE b5 4"), INT),
        (cmd("V.STOREBATCH b5 0 0 1 %", f32(1.5, 1.5, 1.5, 1.5)), OK),
        # scale (15.9375 - 0) / 255 = 1/16, so every multiple of 1/16 is exact
        (cmd("V.STOREBATCH b5 0 1 1 %", f32(0.0) + b"\x00\x00\x7f\x41" + f32(1.0, 0.5)), OK),
        (cmd("V.FETCH b5 0 RANGE 0 2"), bulk(f32(1.5, 1.5, 1.5, 1.5, 0.0) + b"\x00\x00\x7f\x41" + f32(1.0, 0.5))),
        (cmd("V.FETCH b5 0 RANGE 0 1 FMT NATIVE"), bulk(f32(1.5, 1.5, 1.5, 1.5))),
        # FMT RAW: what the rows are, then their bytes as stored; int8 is codes, then scale and minimum of each group
        (
            cmd("V.FETCH b3 0 RANGE 0 1 FMT RAW"),
            b"$72\r\nPRAW\x01\x00\x40\x00\x02\x00\x00\x00\x00\x00\x00\x00\x01\x00\x00\x00\x01\x00\x00\x00"
            b"\x00\x00\x00\x00\x00\x00\x00\x00"
            b"\x08\x00\x00\x00\x00\x00\x00\x00\x01\x00\x00\x00\x00\x00\x00\x00\x08\x00\x00\x00\x00\x00\x00\x00"
            b"\x00\x00\x00\x00\x00\x00\x00\x00\x01\x00\x80\x3f\x00\x50\xc3\x47\r\n",
        ),
        (
            cmd("V.FETCH b4 0 RANGE 0 2 FMT RAW"),
            bulk(praw(4, 0, 2, (9, 0, 0, 0, 1, 8), (9, 1, 0, 1, 1, 0)) + bf16(1.0, 2.0, -1.5, 0.5)),
        ),
        (cmd("V.FETCH b4 0 RANGE 1 2 FMT RAW"), NIL),
        (
            cmd("V.FETCH b5 0 RANGE 1 2 FMT RAW"),
            bulk(praw(4, 1, 1, (0, 0, 0, 1, 1, 8)) + b"\x00\xff\x10\x08\x00\x2c\x00\x00"),
        ),
        (
            cmd("V.FETCH b5 BATCH 1 2 FMT RAW"),
            b"*1\r\n" + bulk(praw(4, 1, 1, (0, 0, 0, 1, 1, 8)) + b"\x00\xff\x10\x08\x00\x2c\x00\x00"),
        ),
        (cmd("V.FETCH b5 0 RANGE 0 1 FMT F16"), err("ERR V.FETCH: unknown FMT (expected NATIVE or RAW)")),
        (cmd("V.FETCH b5 0 1 FMT RAW"), err("ERR FMT RAW requires the RANGE or BATCH form")),
    ),
    case(
        "rows are overwritten, gaps read as zero bytes, the count is the highest end",
        "1.3",
        (cmd("V.CREATE b6 1 VQUANT fp16"), INT),
        (cmd("V.STOREBATCH b6 2 3 1 % FMT F16", f16(1.0)), OK),
        (cmd("V.FETCH b6 2 RANGE 0 5 FMT NATIVE"), bulk(f16(0.0, 0.0, 0.0, 1.0, 0.0))),
        (cmd("V.STOREBATCH b6 2 0 2 % FMT F16", f16(2.0, 3.0)), OK),
        (cmd("V.STOREBATCH b6 2 1 1 % FMT F16", f16(0.5)), OK),
        (cmd("V.FETCH b6 2 RANGE 0 4"), bulk(f32(2.0, 0.5, 0.0, 1.0))),
        (
            cmd("V.INFO b6"),
            re.compile(
                rb"\$\d+\r\nsession_idx:\d+\r\nvalue_dim:1\r\nv_format:fp16\r\nnum_layers:3\r\nschema:uniform\r\n"
                rb"layer_2_tokens:4\r\ntotal_tokens:4\r\n\r\n"
            ),
        ),
    ),
    errors(
        "storebatch refusals in the order of the specification",
        "1.3",
        (cmd("V.STOREBATCH"), STORE_ARGS),
        (cmd("V.STOREBATCH e1 0 0 1"), STORE_ARGS),
        (cmd("V.STOREBATCH nobody 0 0 1 %", b"x"), "ERR session not found"),
        (cmd("V.STOREBATCH nobody -1 0 0 %", b"x"), "ERR session not found"),
        (cmd("V.STOREBATCH e1 0x0 0 1 %", f32(1.0, 2.0)), NOT_INT),
        (cmd("V.STOREBATCH e1 0 00 1 %", f32(1.0, 2.0)), NOT_INT),
        (cmd("V.STOREBATCH e1 0 0 +1 %", f32(1.0, 2.0)), NOT_INT),
        (cmd("V.STOREBATCH e1 % 0 1 %", b"", f32(1.0, 2.0)), NOT_INT),
        (cmd("V.STOREBATCH e1 % 0 1 %", b" 0", f32(1.0, 2.0)), NOT_INT),
        (cmd("V.STOREBATCH e1 -0 0 1 %", f32(1.0, 2.0)), NOT_INT),
        (cmd("V.STOREBATCH e1 -1 0 1 % NOPE", b"x"), "ERR invalid layer_id/start_id/count"),
        (cmd("V.STOREBATCH e1 0 -1 1 % NOPE", b"x"), "ERR invalid layer_id/start_id/count"),
        (cmd("V.STOREBATCH e1 0 0 0 % NOPE", b""), "ERR invalid layer_id/start_id/count"),
        (cmd("V.STOREBATCH e1 80 0 1 % NOPE", b"x"), "ERR V.STOREBATCH: layer_id exceeds MAX_VS_LAYERS"),
        (cmd("V.STOREBATCH e1 0 0 1 % NOPE", b"x"), STORE_OPTION),
        (cmd("V.STOREBATCH e1 0 0 1 % FMT", b"x"), STORE_OPTION),
        (cmd("V.STOREBATCH e1 0 0 1 % FMT F64", b"x"), STORE_OPTION),
        (cmd("V.STOREBATCH e1 0 0 1 % FMT F16 MORE", b"x"), STORE_OPTION),
        (
            cmd("V.STOREBATCH e1 0 0 3 %", b"xyz"),
            "ERR V.STOREBATCH: blob size 3 != expected 24 (count=3 \u00d7 per_layer_dim=2 \u00d7 4)",
        ),
        (
            cmd("V.STOREBATCH e1 0 0 3 % FMT F16", b""),
            "ERR V.STOREBATCH: blob size 0 != expected 12 (count=3 \u00d7 per_layer_dim=2 \u00d7 2)",
        ),
        (
            cmd("V.STOREBATCH e1 0 200000 1 %", b""),
            "ERR V.STOREBATCH: blob size 0 != expected 8 (count=1 \u00d7 per_layer_dim=2 \u00d7 4)",
        ),
        (cmd("V.STOREBATCH e1 0 200000 1 %", f32(1.0, 2.0)), "ERR V.STOREBATCH failed"),
        (cmd("V.STOREBATCH e1 0 199999 2 % FMT F16", f16(1.0, 2.0, 1.0, 2.0)), "ERR V.STOREBATCH failed"),
        setup=(cmd("V.CREATE e1 2 VQUANT fp16"),),
    ),
    case(
        "the last layer and the last row",
        "1.3 2.1",
        (cmd("V.CREATE b7 1 VQUANT fp16"), INT),
        (cmd("V.STOREBATCH b7 79 199999 1 % FMT F16", f16(3.0)), OK),
        (cmd("V.FETCH b7 79 RANGE 199998 200000 FMT NATIVE"), bulk(f16(0.0, 3.0))),
        (cmd("V.FETCH b7 79 199999"), bulk(f32(3.0))),
        (cmd("V.FETCH b7 79 RANGE 200000 200001"), NIL),
    ),
]
