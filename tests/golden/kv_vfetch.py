"""Golden bytes of V.FETCH, V.INFO, rollback and V.EXPORT (wire §1.4 to §1.7), and of the feature gate (§0)."""

from __future__ import annotations

import re

from tests.golden.kit import INT, NIL, NOT_INT, OK, bulk, case, cmd, err, errors, f16, f32, lines

EXPORT_REQUIRES = "ERR V.EXPORT requires: k_session_id v_session_id start end n_layers n_kv_heads head_dim"

CASES = [
    # §1.4 -------------------------------------------------------------------------------------------------
    case(
        "fetch zero-fills beyond the count and is nil iff no asked row is stored",
        "1.4",
        (cmd("V.CREATE f1 1 VQUANT fp16"), INT),
        (cmd("V.FETCH f1 0 RANGE 0 4"), NIL),
        (cmd("V.FETCH f1 0 0 1 2"), NIL),
        (cmd("V.STOREBATCH f1 0 0 2 % FMT F16", f16(1.0, 2.0)), OK),
        (cmd("V.FETCH f1 0 RANGE 1 4"), bulk(f32(2.0, 0.0, 0.0))),
        (cmd("V.FETCH f1 0 RANGE 1 4 FMT NATIVE"), bulk(f16(2.0, 0.0, 0.0))),
        (cmd("V.FETCH f1 0 RANGE 2 4"), NIL),
        (cmd("V.FETCH f1 1 RANGE 0 2"), NIL),
        (cmd("V.FETCH f1 0 7 1 9"), bulk(f32(0.0, 2.0, 0.0))),
        (cmd("V.FETCH f1 0 7 9"), NIL),
        # a layer outside 0..79 is nil, never an unsafe read
        (cmd("V.FETCH f1 80 RANGE 0 2"), NIL),
        (cmd("V.FETCH f1 -1 RANGE 0 2"), NIL),
        (cmd("V.FETCH f1 80 0"), NIL),
        # an empty argument ends the list
        (cmd("V.FETCH f1 0 1 % 0", b""), bulk(f32(2.0))),
        (cmd("V.FETCH f1 0 %", b""), err("ERR no token IDs provided")),
        # extra trailing arguments are ignored (§0)
        (cmd("V.FETCH f1 0 RANGE 0 1 EXTRA"), bulk(f32(1.0))),
    ),
    case(
        "fetch BATCH: an array with one bulk per layer, nil for a layer without rows",
        "1.4",
        (cmd("V.CREATE f2 1 VQUANT fp16"), INT),
        (cmd("V.FETCH f2 BATCH 0 2"), err("ERR V.FETCH BATCH: session has no stored layers")),
        (cmd("V.STOREBATCH f2 0 0 1 % FMT F16", f16(1.0)), OK),
        (cmd("V.STOREBATCH f2 2 0 2 % FMT F16", f16(2.0, 3.0)), OK),
        (
            cmd("V.FETCH f2 BATCH 0 2"),
            (
                b"*3\r\n" + bulk(f32(1.0, 0.0)) + b"$-1\r\n" + bulk(f32(2.0, 3.0)),
                b"*3\r\n" + bulk(f32(1.0, 0.0)) + b"_\r\n" + bulk(f32(2.0, 3.0)),
            ),
        ),
        (cmd("V.FETCH f2 BATCH 0 1 1"), b"*1\r\n" + bulk(f32(1.0))),
        (cmd("V.FETCH f2 BATCH 0 1 1 FMT NATIVE"), b"*1\r\n" + bulk(f16(1.0))),
        (
            cmd("v.fetch f2 batch 1 2 fmt native"),
            (b"*3\r\n$-1\r\n$-1\r\n" + bulk(f16(3.0)), b"*3\r\n_\r\n_\r\n" + bulk(f16(3.0))),
        ),
        # a layer count that is not 0 < n <= num_layers is ignored
        (
            cmd("V.FETCH f2 BATCH 1 2 4 FMT NATIVE"),
            (b"*3\r\n$-1\r\n$-1\r\n" + bulk(f16(3.0)), b"*3\r\n_\r\n_\r\n" + bulk(f16(3.0))),
        ),
        (
            cmd("V.FETCH f2 BATCH 1 2 0"),
            (b"*3\r\n$-1\r\n$-1\r\n" + bulk(f32(3.0)), b"*3\r\n_\r\n_\r\n" + bulk(f32(3.0))),
        ),
    ),
    errors(
        "fetch refusals",
        "1.4",
        (cmd("V.FETCH"), "ERR V.FETCH requires: session_id layer_id token_id [...]"),
        (cmd("V.FETCH f3 0"), "ERR V.FETCH requires: session_id layer_id token_id [...]"),
        (cmd("V.FETCH f3 0 RANGE"), "ERR V.FETCH RANGE requires: session_id layer_id RANGE start end"),
        (cmd("V.FETCH f3 0 RANGE 0"), "ERR V.FETCH RANGE requires: session_id layer_id RANGE start end"),
        (cmd("V.FETCH f3 0 RANGE 1 1"), "ERR invalid RANGE: end must exceed start (>=0)"),
        (cmd("V.FETCH f3 0 RANGE 2 1"), "ERR invalid RANGE: end must exceed start (>=0)"),
        (cmd("V.FETCH f3 0 RANGE -1 1"), "ERR invalid RANGE: end must exceed start (>=0)"),
        (cmd("V.FETCH f3 0 RANGE a 1"), NOT_INT),
        (cmd("V.FETCH f3 0 RANGE 0 1.0"), NOT_INT),
        (cmd("V.FETCH f3 x RANGE 0 1"), NOT_INT),
        (cmd("V.FETCH f3 BATCH 0"), "ERR V.FETCH BATCH requires: session_id BATCH start end [num_layers]"),
        (cmd("V.FETCH f3 BATCH 2 2"), "ERR V.FETCH BATCH invalid range: end must exceed start (>=0)"),
        (cmd("V.FETCH f3 BATCH -2 2"), "ERR V.FETCH BATCH invalid range: end must exceed start (>=0)"),
        (cmd("V.FETCH f3 BATCH 0 x"), NOT_INT),
        (cmd("V.FETCH f3 0 1 FMT NATIVE"), "ERR FMT NATIVE requires the RANGE or BATCH form"),
        (cmd("V.FETCH f3 0 one"), NOT_INT),
        (cmd("V.FETCH nobody 0 0"), "ERR session not found"),
        (cmd("V.FETCH nobody 0 RANGE 0 1"), "ERR session not found"),
        (cmd("V.FETCH nobody BATCH 0 1"), "ERR session not found"),
        setup=(cmd("V.CREATE f3 1 VQUANT fp16"), cmd("V.STOREBATCH f3 0 0 1 % FMT F16", f16(1.0))),
    ),
    # §1.5 -------------------------------------------------------------------------------------------------
    case(
        "info of the store and of a session",
        "1.5",
        (cmd("V.INFO"), b"$56\r\nenabled:1\r\nsessions:0\r\ntotal_tokens:0\r\ntotal_fetches:0\r\n\r\n"),
        (cmd("V.CREATE i1 1 VQUANT fp16"), b":0\r\n"),
        (cmd("V.STOREBATCH i1 0 0 2 % FMT F16", f16(1.0, 2.0)), OK),
        (cmd("V.STOREBATCH i1 2 0 1 % FMT F16", f16(1.0)), OK),
        (cmd("V.FETCH i1 0 0 1 5"), bulk(f32(1.0, 2.0, 0.0))),
        (cmd("V.FETCH i1 0 RANGE 0 2"), bulk(f32(1.0, 2.0))),
        (
            cmd("V.INFO i1"),
            lines(
                "session_idx:0",
                "value_dim:1",
                "v_format:fp16",
                "num_layers:3",
                "schema:uniform",
                "layer_0_tokens:2",
                "layer_2_tokens:1",
                "total_tokens:3",
            ),
        ),
        (cmd("V.INFO"), lines("enabled:1", "sessions:1", "total_tokens:3", "total_fetches:5")),
        (cmd("V.INFO nobody"), err("ERR session not found")),
        fresh=True,
    ),
    # §1.6 -------------------------------------------------------------------------------------------------
    case(
        "snapshot, restore, commit",
        "1.6",
        (cmd("V.CREATE r1 1 VQUANT fp16"), INT),
        (cmd("V.STOREBATCH r1 0 0 2 % FMT F16", f16(1.0, 2.0)), OK),
        (cmd("V.SNAPSHOT r1"), b":1\r\n"),
        (cmd("V.STOREBATCH r1 0 2 2 % FMT F16", f16(3.0, 3.0)), OK),
        (cmd("V.STOREBATCH r1 1 0 1 % FMT F16", f16(0.5)), OK),
        (cmd("V.FETCH r1 0 RANGE 0 4 FMT NATIVE"), bulk(f16(1.0, 2.0, 3.0, 3.0))),
        (cmd("V.RESTORE r1 1"), OK),
        (cmd("V.FETCH r1 0 RANGE 0 4 FMT NATIVE"), bulk(f16(1.0, 2.0, 0.0, 0.0))),
        (cmd("V.FETCH r1 0 RANGE 2 4"), NIL),
        (cmd("V.FETCH r1 1 RANGE 0 1"), NIL),
        (cmd("V.STOREBATCH r1 0 2 1 % FMT F16", f16(0.5)), OK),
        (cmd("V.FETCH r1 0 RANGE 1 3"), bulk(f32(2.0, 0.5))),
        (cmd("V.RESTORE r1 1"), OK),  # it stays valid
        (cmd("V.FETCH r1 0 RANGE 2 3"), NIL),
        (cmd("V.SNAPSHOT r1"), b":2\r\n"),
        (cmd("V.COMMIT r1 1"), b":1\r\n"),
        (cmd("V.COMMIT r1 1"), b":0\r\n"),
        (cmd("V.RESTORE r1 1"), err("ERR V.RESTORE: unknown snap_id for this session")),
        (cmd("V.CREATE r2 1"), INT),
        (cmd("V.RESTORE r2 2"), err("ERR V.RESTORE: unknown snap_id for this session")),
        (cmd("V.COMMIT r2 2"), b":0\r\n"),
        fresh=True,
    ),
    case(
        "sixteen snapshots per session",
        "1.6",
        (cmd("V.CREATE r3 1"), INT),
        *[(cmd("V.SNAPSHOT r3"), INT)] * 16,
        (cmd("V.SNAPSHOT r3"), err("ERR V.SNAPSHOT: no free snapshot slot (max 16 per session)")),
    ),
    errors(
        "snapshot refusals",
        "1.6",
        (cmd("V.SNAPSHOT"), "ERR V.SNAPSHOT requires: session_id"),
        (cmd("V.SNAPSHOT nobody"), "ERR session not found"),
        (cmd("V.RESTORE"), "ERR V.RESTORE requires: session_id snap_id"),
        (cmd("V.RESTORE r4"), "ERR V.RESTORE requires: session_id snap_id"),
        (cmd("V.RESTORE r4 0"), "ERR V.RESTORE: snap_id must be positive"),
        (cmd("V.RESTORE r4 -1"), "ERR V.RESTORE: snap_id must be positive"),
        (cmd("V.RESTORE r4 x"), NOT_INT),
        (cmd("V.RESTORE r4 99999999"), "ERR V.RESTORE: unknown snap_id for this session"),
        (cmd("V.RESTORE nobody 1"), "ERR session not found"),
        (cmd("V.COMMIT r4"), "ERR V.COMMIT requires: session_id snap_id"),
        (cmd("V.COMMIT r4 0"), "ERR V.COMMIT: snap_id must be positive"),
        (cmd("V.COMMIT nobody 1"), "ERR session not found"),
        setup=(cmd("V.CREATE r4 1"),),
    ),
    # §1.7 -------------------------------------------------------------------------------------------------
    case(
        "export: an absolute path that ends as mx.load wants it",
        "1.7",
        (cmd("V.CREATE ex1_pk 2 VQUANT fp16"), INT),
        (cmd("V.CREATE ex1_pv 2 VQUANT fp16"), INT),
        (cmd("V.STOREBATCH ex1_pk 0 0 1 % FMT F16", f16(1.0, 2.0)), OK),
        (cmd("V.STOREBATCH ex1_pv 0 0 1 % FMT F16", f16(0.5, 3.0)), OK),
        (cmd("V.EXPORT ex1_pk ex1_pv 0 1 1 1 2"), re.compile(rb"\$\d+\r\n/[^\r\n]+\.safetensors\r\n")),
    ),
    errors(
        "export: an error, on which published clients fall back",
        "1.7",
        *[
            (cmd(" ".join(["V.EXPORT", *["ex2_pk", "ex2_pv", "0", "1", "1", "1", "2"][:count]])), EXPORT_REQUIRES)
            for count in range(7)
        ],
        (cmd("V.EXPORT nobody ex2_pv 0 1 1 1 2"), "ERR session not found"),
        (cmd("V.EXPORT ex2_pk nobody 0 1 1 1 2"), "ERR session not found"),
        (cmd("V.EXPORT ex2_pk ex2_pv 1 1 1 1 2"), "ERR V.EXPORT invalid range: end must exceed start (>=0)"),
        (cmd("V.EXPORT ex2_pk ex2_pv -1 1 1 1 2"), "ERR V.EXPORT invalid range: end must exceed start (>=0)"),
        (cmd("V.EXPORT ex2_pk ex2_pv 0 x 1 1 2"), NOT_INT),
        (cmd("V.EXPORT ex2_pk ex2_pv 0 1 0 1 2"), "ERR n_layers out of range (1..80)"),
        (cmd("V.EXPORT ex2_pk ex2_pv 0 1 2 1 2"), "ERR V.EXPORT: n_layers 2, K has 1"),
        (cmd("V.EXPORT ex2_pk ex2_pv 0 1 1 0 2"), "ERR n_kv_heads out of range (1..8192)"),
        (
            cmd("V.EXPORT ex2_pk ex2_pv 0 1 1 2 2"),
            "ERR V.EXPORT: n_kv_heads x head_dim is 4, layer 0 of K has rows of 2 values",
        ),
        (cmd("V.EXPORT ex2_pk ex2_pv 0 2 1 1 2"), "ERR V.EXPORT: layer 0 of K does not hold all rows 0..2"),
        (cmd("V.EXPORT ex2_pk ex2_pv 0 1 1 1 2"), "ERR V.EXPORT: n_layers 1, V has 0"),
        setup=(
            cmd("V.CREATE ex2_pk 2 VQUANT fp16"),
            cmd("V.CREATE ex2_pv 2 VQUANT fp16"),
            cmd("V.STOREBATCH ex2_pk 0 0 1 % FMT F16", f16(1.0, 2.0)),
        ),
    ),
    # §0 ---------------------------------------------------------------------------------------------------
    case(
        "a refused command takes exactly its own frame",
        "0",
        (
            cmd("V.CREATE p1 1 VQUANT fp16") + cmd("V.STOREBATCH p1 0 0 1 % FMT F16", f16(2.0)),
            re.compile(rb":\d+\r\n\+OK\r\n"),
        ),
        (
            cmd("V.FETCH p1 0 RANGE 0") + cmd("V.FETCH p1 0 0") + cmd("V.DROP p1") + cmd("V.FETCH p1 0 1"),
            (
                re.compile(
                    rb"-ERR V.FETCH RANGE requires: session_id layer_id RANGE start end\r\n"
                    rb"\$4\r\n\x00\x00\x00\x40\r\n-ERR unknown command.*\r\n\$-1\r\n"
                ),
                re.compile(
                    rb"-ERR V.FETCH RANGE requires: session_id layer_id RANGE start end\r\n"
                    rb"\$4\r\n\x00\x00\x00\x40\r\n-ERR unknown command.*\r\n_\r\n"
                ),
            ),
        ),
    ),
    errors(
        "without --kvcache",
        "0",
        (cmd("V.CREATE g1 4"), "ERR V-store not enabled (use --kvcache)"),
        (cmd("V.SNAPSHOT g1"), "ERR V-store not enabled (use --kvcache)"),
        (cmd("V.STOREBATCH g1 0 0 1 %", b"x"), "ERR V-store not enabled"),
        (cmd("V.FETCH g1 0 0"), "ERR V-store not enabled"),
        (cmd("V.INFO"), "ERR V-store not enabled"),
        (cmd("V.RESTORE g1 1"), "ERR V-store not enabled"),
        (cmd("V.COMMIT g1 1"), "ERR V-store not enabled"),
        (cmd("V.EXPORT g1 g1 0 1 1 1 1"), "ERR V-store not enabled"),
        (cmd("KV.PREFIX.REGISTER g1 4 fp16"), "ERR V-store not enabled (use --kvcache)"),
        (cmd("KV.PREFIX.OWNER g1"), "ERR V-store not enabled (use --kvcache)"),
        (cmd("KV.PREFIX.BLOCKS g1"), "ERR V-store not enabled (use --kvcache)"),
        (cmd("KV.PREFIX.MEMBERSHIP g1 0 %", b""), "ERR V-store not enabled (use --kvcache)"),
        (cmd("KV.PREFIX.SAVE"), "ERR V-store not enabled (use --kvcache)"),
        (cmd("KV.PREFIX.WARM g1 1 64"), "ERR V-store not enabled (use --kvcache)"),
        (cmd("KV.PREFIX.LOOKUP g1"), "ERR V-store not enabled"),
        (cmd("KV.PREFIX.DROP g1"), "ERR V-store not enabled"),
        (cmd("KV.PREFIX.COMMIT"), "ERR V-store not enabled"),
        (cmd("KV.PREFIX.INFO"), "ERR V-store not enabled"),
        flags=("-kvcache",),
    ),
]
