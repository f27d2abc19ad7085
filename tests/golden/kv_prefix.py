"""Golden bytes of KV.PREFIX.* (wire §3.3, §3.4, §4; design §6 for the options the original does not have)."""

from __future__ import annotations

import re

from tests.golden.kit import INT, NIL, NOT_INT, OK, bulk, case, cmd, err, errors, f16, f32, lines, u64s
from tests.golden.kv_v import WANT

HIT = b"+HIT\r\n"
MISS = b"+MISS\r\n"
UNKNOWN = b"+UNKNOWN\r\n"
NS_LEN = "ERR ns_key length must be 1..200"
LONG = "n" * 201
DIGEST = "00ff" * 16
OTHER = "11ee" * 16
MISMATCH = re.compile(rb"-MISMATCH [^\r\n]+\r\n")


CASES = [
    # §4.1 -------------------------------------------------------------------------------------------------
    case(
        "register makes the two sides of one entry",
        "4.1",
        (
            b"*4\r\n$18\r\nKV.PREFIX.REGISTER\r\n$2\r\np1\r\n$1\r\n2\r\n$4\r\nfp16\r\n",
            OK,
        ),
        (cmd("KV.PREFIX.LOOKUP p1"), HIT),  # HIT right after REGISTER, with no row stored
        (
            cmd("V.INFO p1_pk"),
            lines("session_idx:0", "value_dim:2", "v_format:fp16", "num_layers:0", "schema:uniform", "total_tokens:0"),
        ),
        (
            cmd("V.INFO p1_pv"),
            lines("session_idx:1", "value_dim:2", "v_format:fp16", "num_layers:0", "schema:uniform", "total_tokens:0"),
        ),
        (cmd("V.STOREBATCH p1_pk 0 0 1 % FMT F16", f16(1.0, 2.0)), OK),
        (cmd("V.STOREBATCH p1_pv 0 0 1 % FMT F16", f16(3.0, 0.5)), OK),
        (cmd("V.FETCH p1_pk 0 RANGE 0 1 FMT NATIVE"), bulk(f16(1.0, 2.0))),
        (cmd("V.FETCH p1_pv 0 RANGE 0 1"), bulk(f32(3.0, 0.5))),
        (cmd("KV.PREFIX.REGISTER p1 2 fp16"), OK),  # idempotent: the rows stay
        (cmd("V.FETCH p1_pk 0 RANGE 0 1 FMT NATIVE"), bulk(f16(1.0, 2.0))),
        (cmd("kv.prefix.register p2 4 FP16"), OK),
        (cmd("V.CREATE p3_pk 4 VQUANT fp16"), INT),
        (cmd("KV.PREFIX.LOOKUP p3"), MISS),  # one side only
        (cmd("V.CREATE p3_pv 4 VQUANT fp16"), INT),
        (cmd("KV.PREFIX.LOOKUP p3"), HIT),
        (cmd("KV.PREFIX.LOOKUP nobody"), MISS),
        fresh=True,
    ),
    errors(
        "register refusals",
        "4.1",
        (cmd("KV.PREFIX.REGISTER"), "ERR KV.PREFIX.REGISTER requires: ns_key kv_dim vquant"),
        (cmd("KV.PREFIX.REGISTER e1 4"), "ERR KV.PREFIX.REGISTER requires: ns_key kv_dim vquant"),
        (cmd("KV.PREFIX.REGISTER % 4 fp16", b""), NS_LEN),
        (cmd(f"KV.PREFIX.REGISTER {LONG} 4 fp16"), NS_LEN),
        (cmd("KV.PREFIX.REGISTER e1 four fp16"), NOT_INT),
        (cmd("KV.PREFIX.REGISTER e1 04 fp16"), NOT_INT),
        (cmd("KV.PREFIX.REGISTER e1 +4 fp16"), NOT_INT),
        (cmd("KV.PREFIX.REGISTER e1 0 fp16"), "ERR kv_dim out of range"),
        (cmd("KV.PREFIX.REGISTER e1 8193 fp16"), "ERR kv_dim out of range"),
        (cmd("KV.PREFIX.REGISTER e1 4 FP99"), f"ERR KV.PREFIX.REGISTER: unknown vquant 'FP99' {WANT}"),
        (
            cmd("KV.PREFIX.REGISTER e1 64 bf16_rope_fp8_body"),
            f"ERR KV.PREFIX.REGISTER: unknown vquant 'bf16_rope_fp8_body' {WANT}",
        ),
        (cmd("KV.PREFIX.REGISTER e1 100 MLX4G32"), "ERR format mlx4g32 takes rows of multiples of 32 values, not 100"),
        (cmd("KV.PREFIX.REGISTER e1 4 fp16 BLOCKS"), "ERR BLOCKS requires: block_size hash_count hash_blob"),
        (cmd("KV.PREFIX.REGISTER e1 4 fp16 BLOCKS 64 1"), "ERR BLOCKS requires: block_size hash_count hash_blob"),
        (cmd("KV.PREFIX.REGISTER e1 4 fp16 BLOCKS 0 1 %", u64s(1)), "ERR BLOCKS block_size out of range (1..8192)"),
        (cmd("KV.PREFIX.REGISTER e1 4 fp16 BLOCKS 8193 1 %", u64s(1)), "ERR BLOCKS block_size out of range (1..8192)"),
        (
            cmd("KV.PREFIX.REGISTER e1 4 fp16 BLOCKS 64 1048577 %", u64s(1)),
            "ERR BLOCKS hash_count out of range (0..1048576)",
        ),
        (cmd("KV.PREFIX.REGISTER e1 4 fp16 BLOCKS 64 -1 %", b""), "ERR BLOCKS hash_count out of range (0..1048576)"),
        (cmd("KV.PREFIX.REGISTER e1 4 fp16 BLOCKS 64 2 %", u64s(1)), "ERR BLOCKS hash_blob length mismatch"),
        (cmd("KV.PREFIX.REGISTER e1 4 fp16 PREFILL_MS 86400001"), "ERR PREFILL_MS out of range (0..86400000)"),
        (cmd("KV.PREFIX.REGISTER e1 4 fp16 PREFILL_MS -1"), "ERR PREFILL_MS out of range (0..86400000)"),
        (cmd("KV.PREFIX.REGISTER e1 4 fp16 PREFILL_MS 1.5"), NOT_INT),
    ),
    case(
        "a refused register makes nothing",
        "4.1",
        (
            cmd("KV.PREFIX.REGISTER e2 4 fp16 BLOCKS 64 1 % PREFILL_MS 86400001", u64s(7)),
            err("ERR PREFILL_MS out of range (0..86400000)"),
        ),
        (cmd("KV.PREFIX.LOOKUP e2"), MISS),
        (cmd("V.INFO e2_pk"), err("ERR session not found")),
        (
            cmd("KV.PREFIX.REGISTER e2 4 fp16 ROWS 1 NOPE"),
            re.compile(rb"-ERR KV\.PREFIX\.REGISTER unknown option[^\r\n]*\r\n"),
        ),
        (cmd("KV.PREFIX.LOOKUP e2"), MISS),
    ),
    # design §6 --------------------------------------------------------------------------------------------
    errors(
        "register: what the options may be",
        "design 6",
        *[
            (cmd(f"KV.PREFIX.REGISTER e3 4 fp16 {word}"), f"ERR KV.PREFIX.REGISTER option {word} needs a value")
            for word in [
                "PREFILL_MS",
                "ROWS",
                "LAYERS",
                "STATES",
                "DIGEST",
                "SCOPE",
                "PARENT",
                "HEADS",
                "HEAD_DIM",
                "ROPE",
            ]
        ],
        (cmd("KV.PREFIX.REGISTER e3 4 fp16 ROWS 0"), "ERR ROWS out of range (1..200000)"),
        (cmd("KV.PREFIX.REGISTER e3 4 fp16 ROWS 200001"), "ERR ROWS out of range (1..200000)"),
        (cmd("KV.PREFIX.REGISTER e3 4 fp16 ROWS 1 LAYERS 0"), "ERR LAYERS out of range (1..80; 0 with STATES)"),
        (cmd("KV.PREFIX.REGISTER e3 4 fp16 LAYERS 81"), "ERR LAYERS out of range (0..80)"),
        (cmd("KV.PREFIX.REGISTER e3 4 fp16 STATES -1"), "ERR STATES out of range (0..65536)"),
        (cmd("KV.PREFIX.REGISTER e3 4 fp16 STATES 65537"), "ERR STATES out of range (0..65536)"),
        (cmd("KV.PREFIX.REGISTER e3 4 fp16 HEADS 0"), "ERR HEADS out of range (1..8192)"),
        (cmd("KV.PREFIX.REGISTER e3 4 fp16 HEAD_DIM 8193"), "ERR HEAD_DIM out of range (1..8192)"),
        (cmd("KV.PREFIX.REGISTER e3 4 fp16 HEADS 3 HEAD_DIM 2"), "ERR HEADS * HEAD_DIM must equal kv_dim"),
        (cmd("KV.PREFIX.REGISTER e3 4 fp16 DIGEST xyz"), "ERR DIGEST must be 2..128 hex digits"),
        (cmd("KV.PREFIX.REGISTER e3 4 fp16 DIGEST abc"), "ERR DIGEST must be 2..128 hex digits"),
        (cmd("KV.PREFIX.REGISTER e3 4 fp16 SCOPE %", b""), "ERR SCOPE length must be 1..200"),
        (cmd("KV.PREFIX.REGISTER e3 4 fp16 PARENT %", b""), "ERR PARENT length must be 1..200"),
        (
            cmd("KV.PREFIX.REGISTER e3 4 fp16 PARENT e3"),
            "ERR PARENT must be another namespace, and none that continues this one",
        ),
        (cmd("KV.PREFIX.REGISTER e3 4 fp16 ROPE fast"), "ERR ROPE must be a base from 1 to 1e+15, or NONE"),
        (cmd("KV.PREFIX.REGISTER e3 4 fp16 ROPE -1"), "ERR ROPE must be a base from 1 to 1e+15, or NONE"),
        (cmd("KV.PREFIX.REGISTER e3 4 fp16 ROPE 1e300"), "ERR ROPE must be a base from 1 to 1e+15, or NONE"),
        (cmd("KV.PREFIX.REGISTER e3 4 fp16 ROPE inf"), "ERR ROPE must be a base from 1 to 1e+15, or NONE"),
    ),
    case(
        "register with every option; a declared shape is a HIT only when complete",
        "design 6",
        (
            cmd(
                "KV.PREFIX.REGISTER d1 2 fp16 BLOCKS 16 1 % PREFILL_MS 12 ROWS 2 LAYERS 2 "
                f"DIGEST {DIGEST} SCOPE sc PARENT d0 HEADS 1 HEAD_DIM 2 ROPE 10000.5 REPLACE",
                u64s(9),
            ),
            OK,
        ),
        (cmd("KV.PREFIX.LOOKUP d1"), MISS),
        (cmd("V.STOREBATCH d1_pk 0 0 2 % FMT F16", f16(1.0, 2.0, 1.0, 2.0)), OK),
        (cmd("V.STOREBATCH d1_pv 0 0 2 % FMT F16", f16(1.0, 2.0, 1.0, 2.0)), OK),
        (cmd("V.STOREBATCH d1_pk 1 0 2 % FMT F16", f16(1.0, 2.0, 1.0, 2.0)), OK),
        (cmd("KV.PREFIX.LOOKUP d1"), MISS),
        (cmd("V.STOREBATCH d1_pv 1 1 1 % FMT F16", f16(1.0, 2.0)), OK),
        (cmd("KV.PREFIX.LOOKUP d1"), MISS),  # row 0 of the last side is a gap
        (cmd("V.STOREBATCH d1_pv 1 0 1 % FMT F16", f16(1.0, 2.0)), OK),
        (cmd("KV.PREFIX.LOOKUP d1"), HIT),
        (cmd(f"KV.PREFIX.LOOKUP d1 DIGEST {DIGEST}"), HIT),
        (cmd(f"KV.PREFIX.LOOKUP d1 DIGEST {DIGEST.upper()}"), HIT),
        (cmd(f"KV.PREFIX.LOOKUP d1 DIGEST {OTHER}"), MISMATCH),
        (cmd("KV.PREFIX.LOOKUP d1 DIGEST zz"), err("ERR DIGEST must be 2..128 hex digits")),
        (cmd(f"KV.PREFIX.REGISTER d1 2 fp16 ROWS 2 LAYERS 2 DIGEST {DIGEST}"), OK),
        (cmd(f"KV.PREFIX.REGISTER d1 2 fp16 ROWS 2 LAYERS 2 DIGEST {OTHER}"), MISMATCH),
        (cmd(f"KV.PREFIX.REGISTER d1 4 fp16 ROWS 2 LAYERS 2 DIGEST {DIGEST}"), MISMATCH),
        (cmd(f"KV.PREFIX.REGISTER d1 2 fp32 ROWS 2 LAYERS 2 DIGEST {DIGEST}"), MISMATCH),
        (cmd(f"KV.PREFIX.REGISTER d1 2 fp16 ROWS 3 LAYERS 2 DIGEST {DIGEST}"), MISMATCH),
        (cmd("KV.PREFIX.LOOKUP d1"), HIT),
        (cmd(f"KV.PREFIX.REGISTER d1 2 fp16 ROWS 2 LAYERS 2 DIGEST {OTHER} REPLACE"), OK),
        (cmd("KV.PREFIX.LOOKUP d1"), MISS),
        (cmd("KV.PREFIX.REGISTER d2 2 fp16 ROPE NONE"), OK),
    ),
    case(
        "a short fetch of a declared entry is an error, not zeros",
        "design 6",
        (cmd("KV.PREFIX.REGISTER d3 1 fp16 ROWS 3 LAYERS 1"), OK),
        (cmd("V.STOREBATCH d3_pk 0 0 2 % FMT F16", f16(1.0, 2.0)), OK),
        (cmd("V.FETCH d3_pk 0 RANGE 0 2 FMT NATIVE"), bulk(f16(1.0, 2.0))),
        (cmd("V.FETCH d3_pk 0 RANGE 0 3 FMT NATIVE"), re.compile(rb"-ERR [^\r\n]+\r\n")),
    ),
    # §4.2 -------------------------------------------------------------------------------------------------
    errors(
        "lookup refusals",
        "4.2",
        (cmd("KV.PREFIX.LOOKUP"), "ERR KV.PREFIX.LOOKUP requires: ns_key"),
        (cmd("KV.PREFIX.LOOKUP l1 TOKENS"), "ERR KV.PREFIX.LOOKUP option needs a value"),
        (cmd("KV.PREFIX.LOOKUP l1 PREFILL_MS"), "ERR KV.PREFIX.LOOKUP option needs a value"),
        (cmd("KV.PREFIX.LOOKUP l1 TOKENS 5 PREFILL_MS"), "ERR KV.PREFIX.LOOKUP option needs a value"),
        (cmd("KV.PREFIX.LOOKUP l1 ROWS 5"), "ERR KV.PREFIX.LOOKUP unknown option (TOKENS, PREFILL_MS)"),
        (cmd("KV.PREFIX.LOOKUP l1 TOKENS x"), NOT_INT),
        (cmd("KV.PREFIX.LOOKUP l1 TOKENS -1"), "ERR TOKENS out of range (0..100000000)"),
        (cmd("KV.PREFIX.LOOKUP l1 TOKENS 100000001"), "ERR TOKENS out of range (0..100000000)"),
        (cmd("KV.PREFIX.LOOKUP l1 PREFILL_MS -1"), "ERR PREFILL_MS out of range (0..86400000)"),
        (cmd("KV.PREFIX.LOOKUP l1 PREFILL_MS 86400001"), "ERR PREFILL_MS out of range (0..86400000)"),
        setup=(cmd("KV.PREFIX.REGISTER l1 1 fp16"),),
    ),
    # §4.3 -------------------------------------------------------------------------------------------------
    case(
        "drop counts the namespaces that were held",
        "4.3",
        (cmd("KV.PREFIX.DROP"), err("ERR KV.PREFIX.DROP requires: ns_key [ns_key ...]")),
        (cmd("KV.PREFIX.DROP nobody"), b":0\r\n"),
        (cmd("KV.PREFIX.REGISTER x1 1 fp16"), OK),
        (cmd("KV.PREFIX.REGISTER x2 1 fp16"), OK),
        (cmd("V.CREATE x3_pv 1"), INT),
        (cmd("V.STOREBATCH x1_pk 0 0 1 % FMT F16", f16(1.0)), OK),
        (cmd("KV.PREFIX.DROP x1 nobody x2 x3 x1"), b":3\r\n"),
        (cmd("KV.PREFIX.LOOKUP x1"), MISS),
        (cmd("V.FETCH x1_pk 0 RANGE 0 1"), err("ERR session not found")),
        (cmd("V.INFO x3_pv"), err("ERR session not found")),
        (cmd("KV.PREFIX.DROP x1"), b":0\r\n"),
        (cmd("KV.PREFIX.REGISTER x1 2 fp32"), OK),  # another shape after the drop
        (cmd("V.FETCH x1_pk 0 RANGE 0 1"), (b"$-1\r\n", b"_\r\n")),
    ),
    case(
        "owner",
        "4.3",
        (cmd("KV.PREFIX.OWNER"), err("ERR KV.PREFIX.OWNER requires: ns_key")),
        (cmd("KV.PREFIX.OWNER nobody"), b"+-1\r\n"),
        (cmd("KV.PREFIX.REGISTER o1 1 fp16"), OK),
        (cmd("KV.PREFIX.OWNER o1"), b"+0\r\n"),
        (cmd("KV.PREFIX.DROP o1"), b":1\r\n"),
        (cmd("KV.PREFIX.OWNER o1"), b"+-1\r\n"),
    ),
    case(
        "blocks and membership",
        "4.3",
        (cmd("KV.PREFIX.BLOCKS"), err("ERR KV.PREFIX.BLOCKS requires: ns_key")),
        (cmd("KV.PREFIX.BLOCKS nobody"), UNKNOWN),
        (cmd("KV.PREFIX.MEMBERSHIP nobody 1 %", u64s(1)), UNKNOWN),
        (cmd("KV.PREFIX.REGISTER m1 1 fp16"), OK),
        (cmd("KV.PREFIX.BLOCKS m1"), UNKNOWN),
        (cmd("KV.PREFIX.MEMBERSHIP m1 1 %", u64s(1)), UNKNOWN),
        (
            b"*8\r\n$18\r\nKV.PREFIX.REGISTER\r\n$2\r\nm1\r\n$1\r\n1\r\n$4\r\nfp16\r\n$6\r\nBLOCKS\r\n$2\r\n64\r\n$1\r\n3\r\n"
            b"$24\r\n\x03\x00\x00\x00\x00\x00\x00\x00\x01\x00\x00\x00\x00\x00\x00\x80\x02\x00\x00\x00\x00\x00\x00\x00\r\n",
            OK,
        ),
        (
            cmd("KV.PREFIX.BLOCKS m1"),
            b"$32\r\n\x40\x00\x00\x00\x03\x00\x00\x00"
            b"\x03\x00\x00\x00\x00\x00\x00\x00\x01\x00\x00\x00\x00\x00\x00\x80\x02\x00\x00\x00\x00\x00\x00\x00\r\n",
        ),
        # bit i is byte i >> 3, least significant first: probes 1, 3 and 8 are registered
        (
            cmd("KV.PREFIX.MEMBERSHIP m1 9 %", u64s(1, 3, 4, 0x8000000000000001, 0, 5, 6, 7, 2)),
            b"$2\r\n\x0a\x01\r\n",
        ),
        (cmd("KV.PREFIX.MEMBERSHIP m1 0 %", b""), b"$0\r\n\r\n"),
        (cmd("KV.PREFIX.REGISTER m1 1 fp16"), OK),  # without BLOCKS the table stays
        (cmd("KV.PREFIX.MEMBERSHIP m1 1 %", u64s(3)), b"$1\r\n\x01\r\n"),
        (cmd("KV.PREFIX.REGISTER m1 1 fp16 BLOCKS 16 1 %", u64s(77)), OK),
        (cmd("KV.PREFIX.BLOCKS m1"), b"$16\r\n\x10\x00\x00\x00\x01\x00\x00\x00\x4d\x00\x00\x00\x00\x00\x00\x00\r\n"),
        (cmd("KV.PREFIX.MEMBERSHIP m1 2 %", u64s(3, 77)), b"$1\r\n\x02\r\n"),
        (cmd("KV.PREFIX.REGISTER m1 1 fp16 BLOCKS 16 0 %", b""), OK),
        (cmd("KV.PREFIX.BLOCKS m1"), UNKNOWN),  # a table of no hashes is none
        (cmd("KV.PREFIX.MEMBERSHIP m1 1 %", u64s(77)), UNKNOWN),
    ),
    errors(
        "membership refusals",
        "4.3",
        (cmd(f"KV.PREFIX.BLOCKS {LONG}"), NS_LEN),
        (cmd(f"KV.PREFIX.MEMBERSHIP {LONG} 1 %", u64s(1)), NS_LEN),
        (cmd("KV.PREFIX.MEMBERSHIP m2 1048577 %", u64s(1)), "ERR hash_count out of range (0..1048576)"),
        (cmd("KV.PREFIX.MEMBERSHIP m2 -1 %", b""), "ERR hash_count out of range (0..1048576)"),
        (cmd("KV.PREFIX.MEMBERSHIP m2 x %", b""), NOT_INT),
        (cmd("KV.PREFIX.MEMBERSHIP m2 2 %", u64s(1)), "ERR hash_blob length mismatch"),
        (cmd("KV.PREFIX.MEMBERSHIP m2 0 %", u64s(1)), "ERR hash_blob length mismatch"),
        setup=(cmd("KV.PREFIX.REGISTER m2 1 fp16 BLOCKS 64 1 %", u64s(5)),),
    ),
    # §3.3, §3.4 -------------------------------------------------------------------------------------------
    case(
        "save and commit",
        "3.3 3.4",
        (cmd("KV.PREFIX.SAVE"), err("ERR KV.PREFIX.SAVE failed (no active sessions or io error)")),
        (cmd("KV.PREFIX.COMMIT"), OK),
        (cmd("KV.PREFIX.REGISTER sv1 1 fp16"), OK),
        (cmd("V.STOREBATCH sv1_pk 0 0 1 % FMT F16", f16(1.0)), OK),
        (cmd("KV.PREFIX.COMMIT"), OK),
        (cmd("KV.PREFIX.SAVE"), OK),
        (cmd("KV.PREFIX.SAVE copies/first"), OK),
        (cmd("KV.PREFIX.LOOKUP sv1"), HIT),
        fresh=True,
    ),
    errors(
        "save takes paths inside the data directory only",
        "3.3",
        *[
            (
                cmd("KV.PREFIX.SAVE %", path),
                "ERR KV.PREFIX.SAVE: path must be relative to the data directory "
                "(no leading '/', no '..', no control bytes)",
            )
            for path in (b"", b"/tmp/x", b"~/x", b"../x", b"a/../x", b"a/..", b"a\x01b", b"a\x7fb", b"a\nb")
        ],
        setup=(cmd("KV.PREFIX.REGISTER sv2 1 fp16"),),
    ),
    errors(
        "commit without a log",
        "3.4",
        (cmd("KV.PREFIX.COMMIT"), "ERR KV.PREFIX.COMMIT: --no-wal, writes are not logged"),
        flags=("--no-wal",),
    ),
    # §4.6 -------------------------------------------------------------------------------------------------
    case(
        "info: field names and order",
        "4.6",
        (cmd("KV.PREFIX.REGISTER n1 2 fp16"), OK),
        (cmd("V.STOREBATCH n1_pk 0 0 2 % FMT F16", f16(1.0, 2.0, 1.0, 2.0)), OK),
        (cmd("V.STOREBATCH n1_pk 1 0 1 % FMT F16", f16(1.0, 2.0)), OK),
        (cmd("V.STOREBATCH n1_pv 0 0 2 % FMT F16", f16(1.0, 2.0, 1.0, 2.0)), OK),
        (cmd("V.FETCH n1_pk 0 RANGE 0 2 FMT NATIVE"), bulk(f16(1.0, 2.0, 1.0, 2.0))),
        (
            cmd("KV.PREFIX.INFO"),
            re.compile(
                rb"\$\d+\r\nregistered_prefixes:1\r\ntotal_prefix_tokens:3\r\nvstore_sessions:2\r\n"
                rb"vstore_total_fetches:2\r\nvstore_evictions:0\r\nvstore_max_sessions:65536\r\nvstore_bytes:20\r\n"
                rb"wal_enabled:1\r\nwal_bytes:\d+\r\nwal_appended:\d+\r\nwal_replayed:0\r\n"
                rb"directory_enabled:[01]\r\nmy_worker_id:0\r\ndirectory_entries:\d+\r\n"
                rb"sdpa_warm:0\r\nsdpa_cold:0\r\nsdpa_demotions:0\r\nsdpa_rehydrates:0\r\n[^$]*\r\n"
            ),
        ),
        (cmd("KV.PREFIX.DROP n1"), b":1\r\n"),
        # §2.1: every dropped session counts as an eviction, K and V apart
        (
            cmd("KV.PREFIX.INFO"),
            re.compile(
                rb"\$\d+\r\nregistered_prefixes:0\r\ntotal_prefix_tokens:0\r\nvstore_sessions:0\r\n"
                rb"vstore_total_fetches:2\r\nvstore_evictions:2\r\nvstore_max_sessions:65536\r\nvstore_bytes:0\r\n(?s:.*)"
            ),
        ),
        fresh=True,
    ),
    # §4, --ns-prefix --------------------------------------------------------------------------------------
    errors(
        "--ns-prefix",
        "4",
        *[
            (
                cmd(line, *blobs),
                "ERR namespace must start with required prefix 'acme|' (multi-tenant isolation)",
            )
            for line, blobs in (
                ("KV.PREFIX.REGISTER other|1 4 fp16", ()),
                ("KV.PREFIX.LOOKUP other|1", ()),
                ("KV.PREFIX.DROP acme|1 other|1", ()),
                ("KV.PREFIX.OWNER other|1", ()),
                ("KV.PREFIX.BLOCKS other|1", ()),
                ("KV.PREFIX.MEMBERSHIP other|1 1 %", (u64s(1),)),
                ("KV.PREFIX.WARM other|1 1 64", ()),
                ("KV.PREFIX.WHY other|1", ()),
            )
        ],
        setup=(cmd("KV.PREFIX.REGISTER acme|1 4 fp16"), cmd("V.CREATE free 4")),
        flags=("--ns-prefix", "acme|"),
    ),
    case(
        "--ns-prefix: drop checks every name before it drops any; V.* is not confined",
        "4",
        (cmd("KV.PREFIX.REGISTER acme|2 4 fp16"), OK),
        (
            cmd("KV.PREFIX.DROP acme|2 other|1"),
            err("ERR namespace must start with required prefix 'acme|' (multi-tenant isolation)"),
        ),
        (cmd("KV.PREFIX.LOOKUP acme|2"), HIT),
        (cmd("V.CREATE free2 4"), INT),
        flags=("--ns-prefix", "acme|"),
    ),
    # design §6: ours --------------------------------------------------------------------------------------
    case(
        "list walks the namespaces by scope and pattern",
        "design 6",
        (cmd("KV.PREFIX.LIST"), b"*2\r\n$1\r\n0\r\n*0\r\n"),
        (cmd("KV.PREFIX.REGISTER li1 1 fp16 SCOPE s1"), OK),
        (cmd("KV.PREFIX.LIST"), b"*2\r\n$1\r\n0\r\n*1\r\n$3\r\nli1\r\n"),
        (cmd("KV.PREFIX.REGISTER other 1 fp16 SCOPE s2"), OK),
        (cmd("KV.PREFIX.LIST SCOPE s2"), b"*2\r\n$1\r\n0\r\n*1\r\n$5\r\nother\r\n"),
        (cmd("KV.PREFIX.LIST MATCH l* COUNT 100 CURSOR 0"), b"*2\r\n$1\r\n0\r\n*1\r\n$3\r\nli1\r\n"),
        (cmd("KV.PREFIX.LIST SCOPE s2 MATCH l*"), b"*2\r\n$1\r\n0\r\n*0\r\n"),
        (cmd("KV.PREFIX.FLUSH"), b":2\r\n"),
        (cmd("KV.PREFIX.LIST"), b"*2\r\n$1\r\n0\r\n*0\r\n"),
        (cmd("KV.PREFIX.LOOKUP li1"), MISS),
        fresh=True,
    ),
    errors(
        "list refusals",
        "design 6",
        (cmd("KV.PREFIX.LIST SCOPE"), "ERR KV.PREFIX.LIST option needs a value"),
        (cmd("KV.PREFIX.LIST CURSOR x"), "ERR invalid cursor"),
        (cmd("KV.PREFIX.LIST COUNT 0"), "ERR syntax error"),
        (cmd("KV.PREFIX.LIST COUNT x"), NOT_INT),
        (cmd("KV.PREFIX.LIST NOPE 1"), "ERR KV.PREFIX.LIST unknown option (SCOPE, MATCH, COUNT, CURSOR)"),
    ),
    case(
        "a lane is for one namespace",
        "design 2",
        (cmd("KV.PREFIX.LANE"), err("ERR KV.PREFIX.LANE requires: ns_key")),
        (cmd("KV.PREFIX.LANE a b"), err("ERR KV.PREFIX.LANE requires: ns_key")),
    ),
    case(
        "why a namespace is not there",
        "design 6",
        (cmd("KV.PREFIX.WHY"), err("ERR KV.PREFIX.WHY requires: ns_key")),
        (cmd("KV.PREFIX.WHY never-seen"), re.compile(rb"\$\d+\r\nnever[^\r\n]*\r\n")),
        (cmd("KV.PREFIX.REGISTER y1 1 fp16 ROWS 1 LAYERS 1"), OK),
        (cmd("KV.PREFIX.WHY y1"), re.compile(rb"\$\d+\r\nincomplete[^\r\n]*\r\n")),
        (cmd("KV.PREFIX.DROP y1"), b":1\r\n"),
        (cmd("KV.PREFIX.WHY y1"), re.compile(rb"\$\d+\r\ndropped[^\r\n]*\r\n")),
    ),
    case(
        "prefixes of a scope that begin alike",
        "design 6",
        (cmd("KV.PREFIX.REGISTER m1 1 fp16 ROWS 32 LAYERS 0 STATES 1 SCOPE sc BLOCKS 16 2 %", u64s(1, 2)), OK),
        (cmd("KV.PREFIX.MATCH sc 1 %", u64s(1)), b"*0\r\n"),
        (cmd("SSM.PREFIX.STORE m1 0 x"), OK),
        (
            cmd("KV.PREFIX.MATCH sc 3 %", u64s(1, 2, 3)),
            (b"*1\r\n*4\r\n$2\r\nm1\r\n:2\r\n:32\r\n$-1\r\n", b"*1\r\n*4\r\n$2\r\nm1\r\n:2\r\n:32\r\n_\r\n"),
        ),
        (cmd("KV.PREFIX.MATCH sc 2 %", u64s(2, 1)), b"*0\r\n"),
        (cmd("KV.PREFIX.MATCH elsewhere 1 %", u64s(1)), b"*0\r\n"),
        (cmd("KV.PREFIX.MATCH sc 2 %", u64s(1)), err("ERR hash_blob length mismatch")),
        (cmd("KV.PREFIX.MATCH sc 1 % LIMIT 257", u64s(1)), err("ERR LIMIT out of range (1..256)")),
        (cmd("KV.PREFIX.MATCH sc 1"), err("ERR KV.PREFIX.MATCH requires: scope hash_count hash_blob [LIMIT n]")),
    ),
    case(
        "what belongs to a digest goes nowhere else",
        "design 6",
        (cmd("KV.PREFIX.REGISTER g1 2 fp16 ROWS 1 LAYERS 1 DIGEST AB"), OK),
        (cmd("V.STOREBATCH g1_pk 0 0 1 % FMT F16 DIGEST ab", f16(1.0, 2.0)), OK),
        (
            cmd("V.STOREBATCH g1_pv 0 0 1 % DIGEST cd FMT F16", f16(1.0, 2.0)),
            err("MISMATCH 'g1' is stored with another digest (digest ab, not cd)"),
        ),
        (cmd("KV.PREFIX.ABANDON g1 cd"), b":0\r\n"),
        (cmd("KV.PREFIX.ABANDON none cd"), b":0\r\n"),
        (cmd("V.STOREBATCH g1_pv 0 0 1 % DIGEST AB FMT F16", f16(1.0, 2.0)), OK),
        (cmd("KV.PREFIX.ABANDON g1 AB"), b":0\r\n"),
        (cmd("SSM.PREFIX.STORE g1 0 s DIGEST AB"), OK),
        (
            cmd("SSM.PREFIX.STORE g1 0 t DIGEST CD"),
            err("MISMATCH 'g1' is stored with another digest (digest ab, not cd)"),
        ),
        (cmd("SSM.PREFIX.FETCH g1 0"), bulk(b"s")),
        (cmd("SSM.PREFIX.STORE none 0 t DIGEST CD"), err("ERR session not found")),
        (cmd("SSM.PREFIX.FETCH none 0"), NIL),
        (cmd("V.CREATE raw 2 VQUANT fp16"), re.compile(rb":\d+\r\n")),
        (
            cmd("V.STOREBATCH raw 0 0 1 % FMT F16 DIGEST cd", f16(1.0, 2.0)),
            err("MISMATCH 'raw' is stored with another digest (no digest, not cd)"),
        ),
        (cmd("KV.PREFIX.REGISTER g1 2 fp16 ROWS 2 LAYERS 1 DIGEST EF REPLACE"), OK),
        (cmd("KV.PREFIX.ABANDON g1 EF"), b":1\r\n"),
        (cmd("KV.PREFIX.LOOKUP g1"), b"+MISS\r\n"),
        (
            cmd("KV.PREFIX.WHY g1"),
            re.compile(rb"\$\d+\r\ndropped by KV.PREFIX.ABANDON before it was complete[^\r\n]*\r\n"),
        ),
        (cmd("V.STOREBATCH g1_pk 0 0 1 % FMT F16 DIGEST", f16(1.0, 2.0)), err("ERR session not found")),
        (cmd("SSM.PREFIX.STORE g1 0 t FMT F16"), err("ERR SSM.PREFIX.STORE: unknown option (expected DIGEST hex)")),
        (cmd("KV.PREFIX.ABANDON g1"), err("ERR KV.PREFIX.ABANDON requires: ns_key digest")),
        (cmd("KV.PREFIX.ABANDON g1 xyz"), err("ERR DIGEST must be 2..128 hex digits")),
    ),
    case(
        "pin, expire, persist, lease, info of one",
        "design 6",
        (cmd("KV.PREFIX.PIN none"), b":0\r\n"),
        (cmd("KV.PREFIX.UNPIN none"), b":0\r\n"),
        (cmd("KV.PREFIX.EXPIRE none 10"), b":0\r\n"),
        (cmd("KV.PREFIX.PERSIST none"), b":0\r\n"),
        (cmd("KV.PREFIX.INFO none"), bulk(b"stored:0\r\nlease_ms:0\r\n")),
        (cmd("KV.PREFIX.REGISTER k1 1 fp16 SCOPE sc DIGEST AB"), OK),
        (cmd("KV.PREFIX.REGISTER k2 1 fp16 PARENT k1"), OK),
        (cmd("KV.PREFIX.PIN k1 none k2"), b":2\r\n"),
        (cmd("KV.PREFIX.PIN k1"), b":1\r\n"),
        (cmd("KV.PREFIX.UNPIN k2 k2"), b":1\r\n"),
        (cmd("KV.PREFIX.EXPIRE k1 100"), b":1\r\n"),
        (cmd("KV.PREFIX.EXPIRE k1 100 NX"), b":0\r\n"),
        (cmd("KV.PREFIX.EXPIRE k2 100 XX"), b":0\r\n"),
        (cmd("KV.PREFIX.EXPIRE k2 100 gt"), b":0\r\n"),
        (cmd("KV.PREFIX.EXPIRE k1 1000 GT"), b":1\r\n"),
        (cmd("KV.PREFIX.EXPIRE k1 1000000 LT"), b":0\r\n"),
        (cmd("KV.PREFIX.LEASE k1 60000"), b":1\r\n"),
        (
            cmd("KV.PREFIX.INFO k1"),
            re.compile(
                rb"\$\d+\r\nstored:1\r\ncomplete:1\r\nrows:0\r\nbytes:0\r\nfile_bytes:4096\r\ndigest:ab\r\nscope:sc\r\n"
                rb"parent:\r\nchildren:1\r\npinned:1\r\nttl:(1000|999)\r\npttl:(1000000|99\d{4})\r\n"
                rb"lease_ms:(60000|5\d{4})\r\n\r\n"
            ),
        ),
        (
            cmd("KV.PREFIX.WHY k1"),
            re.compile(
                rb"\$\d+\r\nhit: no declared shape.*; continued by 1, which are evicted before it; pinned; "
                rb"expires in (1000|999)\.\d{3} s; leased for (60|5\d)\.\d{3} s\r\n"
            ),
        ),
        (cmd("KV.PREFIX.WHY k2"), re.compile(rb"\$\d+\r\nhit: no declared shape.*; continues 'k1'\r\n")),
        (cmd("KV.PREFIX.PERSIST k1"), b":1\r\n"),
        (cmd("KV.PREFIX.PERSIST k1"), b":0\r\n"),
        (cmd("KV.PREFIX.LEASE k1 0"), b":1\r\n"),
        (cmd("KV.PREFIX.LEASE k1 1000 OWNER me"), b":1\r\n"),
        (cmd("KV.PREFIX.EXPIRE k2 0"), b":1\r\n"),
        (cmd("KV.PREFIX.EXPIRE k1 -1"), b":1\r\n"),
        (cmd("KV.PREFIX.LOOKUP k1"), b"+MISS\r\n"),
        (cmd("KV.PREFIX.WHY k2"), re.compile(rb"\$\d+\r\nexpired[^\r\n]*\r\n")),
    ),
    errors(
        "pin, expire, persist, lease refusals",
        "design 6",
        (cmd("KV.PREFIX.PIN"), "ERR KV.PREFIX.PIN requires: ns_key [ns_key ...]"),
        (cmd("KV.PREFIX.UNPIN"), "ERR KV.PREFIX.UNPIN requires: ns_key [ns_key ...]"),
        (cmd("KV.PREFIX.EXPIRE ns"), "ERR KV.PREFIX.EXPIRE requires: ns_key seconds [NX|XX|GT|LT]"),
        (cmd("KV.PREFIX.EXPIRE ns x"), NOT_INT),
        (cmd("KV.PREFIX.EXPIRE ns 1 FOO"), "ERR Unsupported option FOO"),
        (
            cmd("KV.PREFIX.EXPIRE ns 1 NX GT"),
            "ERR NX and XX, GT or LT options at the same time are not compatible",
        ),
        (
            cmd("KV.PREFIX.EXPIRE ns 9223372036854775807"),
            "ERR invalid expire time in 'kv.prefix.expire' command",
        ),
        (cmd("KV.PREFIX.PERSIST"), "ERR KV.PREFIX.PERSIST requires: ns_key"),
        (cmd("KV.PREFIX.LEASE ns"), "ERR KV.PREFIX.LEASE requires: ns_key ms [OWNER name]"),
        (cmd("KV.PREFIX.LEASE ns -1"), "ERR ms out of range (0..86400000)"),
        (cmd("KV.PREFIX.LEASE ns 86400001"), "ERR ms out of range (0..86400000)"),
        (cmd("KV.PREFIX.LEASE ns 1 FOR me"), "ERR KV.PREFIX.LEASE unknown option 'FOR' (OWNER)"),
        (cmd("KV.PREFIX.LEASE ns 1 OWNER"), "ERR KV.PREFIX.LEASE OWNER needs a name of 1..200 bytes"),
    ),
    errors(
        "register.schema refusals",
        "design 6",
        (
            cmd("KV.PREFIX.REGISTER.SCHEMA q1 1"),
            "ERR KV.PREFIX.REGISTER.SCHEMA requires: ns_key N kspec_0 ... kspec_{N-1} vspec_0 ... vspec_{N-1}",
        ),
        (cmd("KV.PREFIX.REGISTER.SCHEMA q1 0 dim=4"), "ERR KV.PREFIX.REGISTER.SCHEMA: N must be 1-80"),
        (cmd("KV.PREFIX.REGISTER.SCHEMA q1 81 dim=4*81 dim=4*81"), "ERR KV.PREFIX.REGISTER.SCHEMA: N must be 1-80"),
        (cmd("KV.PREFIX.REGISTER.SCHEMA q1 x dim=4 dim=4"), NOT_INT),
        (
            cmd("KV.PREFIX.REGISTER.SCHEMA q1 2 dim=4*2 dim=4"),
            "ERR KV.PREFIX.REGISTER.SCHEMA: not enough layer specs (need 2 for K and 2 for V)",
        ),
        (
            cmd("KV.PREFIX.REGISTER.SCHEMA q1 2 dim=4 dim=4*2 dim=4*2"),
            "ERR KV.PREFIX.REGISTER.SCHEMA: K has 2 layers, its specs are more",
        ),
        (
            cmd("KV.PREFIX.REGISTER.SCHEMA q1 1 dim=4*0 dim=4"),
            "ERR KV.PREFIX.REGISTER.SCHEMA: K has 1 layers, its specs are more",
        ),
        (
            cmd("KV.PREFIX.REGISTER.SCHEMA q1 1 dim=4 fmt=fp16"),
            "ERR KV.PREFIX.REGISTER.SCHEMA: V layer 0 missing dim and no default supplied",
        ),
        (
            cmd("KV.PREFIX.REGISTER.SCHEMA q1 2 dim=4 fmt=no,dim=4 dim=4*2"),
            "ERR KV.PREFIX.REGISTER.SCHEMA: K layer 1 unknown fmt",
        ),
        (
            cmd("KV.PREFIX.REGISTER.SCHEMA q1 1 dim=4 dim=4 LAYERS 2 ROWS 3"),
            "ERR LAYERS must be the number of layers of the schema",
        ),
        (
            cmd("KV.PREFIX.REGISTER.SCHEMA q1 1 dim=4 dim=6 HEADS 2 HEAD_DIM 2"),
            "ERR HEADS * HEAD_DIM must equal kv_dim",
        ),
        (cmd("KV.PREFIX.REGISTER.SCHEMA q1 1 dim=4 dim=4 LAYERS 1"), "ERR ROWS and LAYERS are declared together"),
        (
            cmd("KV.PREFIX.REGISTER.SCHEMA q1 1 dim=4 dim=4 NOPE"),
            "ERR KV.PREFIX.REGISTER.SCHEMA unknown option 'NOPE' (BLOCKS, PREFILL_MS, ROWS, LAYERS, STATES, DIGEST, "
            "SCOPE, PARENT, HEADS, HEAD_DIM, ROPE, REPLACE)",
        ),
        (cmd("V.INFO q1_pk"), "ERR session not found"),
    ),
    case(
        "register.schema: K and V, layer by layer",
        "design 6",
        (
            cmd(
                "KV.PREFIX.REGISTER.SCHEMA q2 2 fmt=fp16,dim=2*2 fmt=fp32,dim=2 dim=1,fmt=bf16 "
                "ROWS 1 LAYERS 2 DIGEST ab"
            ),
            OK,
        ),
        (cmd("KV.PREFIX.LOOKUP q2"), b"+MISS\r\n"),
        (cmd("V.STOREBATCH q2_pk 0 0 1 % FMT F16", f16(1.0, 2.0)), OK),
        (cmd("V.STOREBATCH q2_pk 1 0 1 % FMT F16", f16(3.0, 2.0)), OK),
        (cmd("V.STOREBATCH q2_pv 0 0 1 %", f32(1.0, 2.0)), OK),
        (cmd("V.STOREBATCH q2_pv 1 0 1 %", f32(-1.5)), OK),
        (cmd("KV.PREFIX.LOOKUP q2 DIGEST AB"), b"+HIT\r\n"),
        (cmd("V.FETCH q2_pk BATCH 0 1 FMT NATIVE"), b"*2\r\n" + bulk(f16(1.0, 2.0)) + bulk(f16(3.0, 2.0))),
        (cmd("V.FETCH q2_pv BATCH 0 1"), b"*2\r\n" + bulk(f32(1.0, 2.0)) + bulk(f32(-1.5))),
        # the same again, and a uniform REGISTER that would mean something else
        (cmd("KV.PREFIX.REGISTER.SCHEMA q2 2 fmt=fp16,dim=2 fmt=fp16,dim=2 fmt=fp32,dim=2 fmt=bf16,dim=1"), OK),
        (
            cmd("KV.PREFIX.REGISTER.SCHEMA q2 2 fmt=fp16,dim=2*2 fmt=fp32,dim=2 fmt=fp16,dim=1"),
            err("MISMATCH 'q2' is stored with another schema (layer 1 is bf16 of 1, not fp16 of 1)"),
        ),
        (
            cmd("KV.PREFIX.REGISTER q2 2 fp16"),
            err("MISMATCH 'q2' is stored with another schema (2 layers of their own, not 0)"),
        ),
        (
            cmd("KV.PREFIX.WHY q2"),
            bulk(
                b"hit: 2 layers of 1 rows, 4 rows, 18 bytes; "
                b"K fp16, 2 values per row, V fp32/bf16, 2/1 values per row, digest ab"
            ),
        ),
    ),
]
