"""Every cap of the server and the client, once, each with its reason. No imports.

Sizes are bytes and times are seconds unless the name says otherwise.
"""

from typing import Final

KIB: Final = 1 << 10
MIB: Final = 1 << 20
GIB: Final = 1 << 30

# --- server ------------------------------------------------------------------------------------------------------
DEFAULT_PORT: Final = 1974  # the port of the seeds
DATABASES: Final = 16  # Redis's default; SELECT refuses the rest
DEFAULT_MAXCLIENTS: Final = 10_000  # Redis's default; LMCache alone opens pools of 150
DEFAULT_WORKERS: Final = 2  # mover threads
MAX_WORKERS: Final = 64
PASSWORD_MAX: Final = 511  # the seeds' limit
SLOWLOG_MAX_LEN: Final = 128  # Redis's default ring
SLOWLOG_SLOWER_THAN_US: Final = 10_000  # Redis's default threshold
SLOWLOG_MAX_ARGC: Final = 32  # Redis keeps 32 arguments of 128 bytes per entry
SLOWLOG_MAX_STRING: Final = 128

# --- requests (Redis's own parser limits; case A3: memory follows bytes received) ---------------------------------
MAX_BULK: Final = 512 * MIB
MAX_ARGS: Final = 1024 * 1024
MAX_INLINE: Final = 64 * KIB
PREAUTH_MAX_ARGS: Final = 10  # AUTH and HELLO need fewer; Redis uses the same two bounds
PREAUTH_MAX_BULK: Final = 16 * KIB
PREAUTH_MAX_OUTPUT: Final = 64 * KIB  # case A4: a client that never logs in and never reads
QUERY_BUFFER: Final = 1 * GIB  # one half-read command, streamed arguments excepted
QUERY_BUFFER_TOTAL: Final = 4 * GIB  # all half-read commands together
STREAM_MIN: Final = 256 * KIB  # a V.STOREBATCH body from this size on goes straight to its file
STRING_MAX: Final = 512 * MIB  # Redis's proto-max-bulk-len bounds APPEND and SETRANGE too

# --- replies ------------------------------------------------------------------------------------------------------
MAX_OUTPUT: Final = 64 * MIB  # bytes in memory queued for one connection before it is no longer read
MAX_OUTPUT_SLOTS: Final = 65_536
SEND_TIMEOUT: Final = 60.0  # without progress while output is pending; published clients use 60 to 120 s
OUTPUT_TOTAL: Final = 1 * GIB  # all connections together

# --- V-store and prefixes (wire.md §1, §2, §4) ---------------------------------------------------------------------
MAX_LAYERS: Final = 80
MAX_ROWS: Final = 200_000
MAX_STATES: Final = 65_536  # the record header's field; wire.md bounds layers of state alike
MAX_DIM: Final = 8192
MAX_NAMESPACE: Final = 200
MAX_SID: Final = 4096  # the original's snapshot loader accepts as much
MAX_SNAPSHOTS: Final = 16
MAX_SCHEMA_LAYERS: Final = 59  # a 64-token frame of the original
MAX_FETCH_IDS: Final = 1024
MAX_BLOCK_HASHES: Final = 1_048_576
MAX_BLOCK_SIZE: Final = 8192
MAX_PREFILL_MS: Final = 86_400_000  # one day
MAX_LEASE_MS: Final = 86_400_000  # one day: a lease that is forgotten ends
PREFILL_US_PER_TOKEN: Final = 555  # the seeds' estimate for a hit without a measured PREFILL_MS
MEMBERSHIP_INLINE: Final = 16_384  # more hashes than this go to a mover: about 80 µs of plane time
DEFAULT_MAX_SESSIONS: Final = 65_536
DEFAULT_MAX_BYTES_SHARE: Final = 0.8  # of the free disk at start
COMPACT_EXTENTS: Final = 64  # per layer and side
COMPACT_DEAD_SHARE: Final = 0.25
EXPORT_BYTES: Final = 8 * GIB  # of all files of V.EXPORT; and a share of --max-bytes, beside which they stand
EXPORT_SHARE: Final = 4
EXPORT_FILES: Final = 64
LANE_SOCKET: Final = "pion.lane"  # its name in the data directory
LANE_TICKET_SECONDS: Final = 5.0  # between KV.PREFIX.LANE and the lane's socket
LANE_TICKETS: Final = 1024  # at a time
LANE_TICKET_FILES: Final = 64  # of the newest tickets are held open, fewer where the process may open few
LANE_CLIENTS: Final = 64  # at the lane's socket at a time; each stays for a moment
LANE_LENT: Final = 256  # files that clients may map, and that are held open to ask the kernel whether they still do
EXPORT_UNUSED: Final = 600.0  # seconds after which a file that nobody asks for is deleted

# --- attention (wire.md §5) ----------------------------------------------------------------------------------------
ATTEND_WARM_SLOTS: Final = 256  # layers whose K/V are in memory
ATTEND_COLD_SLOTS: Final = 1024  # layers that are remembered after their K/V went
ATTEND_MAX_SLOTS: Final = 1 << 20
ATTEND_MAX_BYTES: Final = 8 * GIB  # of K/V in memory, where nobody says; the server: a share of the machine's memory
ATTEND_MEMORY_SHARE: Final = 4
ATTEND_MAX_HEAD_DIM: Final = 512
ATTEND_HEAD_DIM_STEP: Final = 8
ATTEND_HEAD_DIMS: Final = "multiples of 8 up to 512"
ATTEND_MAX_HEADS: Final = 256  # of K/V: a head map has one byte a head
FASTLANE_BODY: Final = 256 * MIB  # of a request of the binary lane: Q and a suffix of 32,768 tokens, 8 heads of 128
FASTLANE_PREAUTH_BODY: Final = 4 * KIB  # AUTH needs less
FASTLANE_REPLY: Final = 4 * MIB  # header and body; the original's clients know no longer ones
ATTEND_INLINE: Final = 1 << 18  # multiplications that take the plane's thread less time than giving them to another

# --- formats: the code is a byte on disk and never changes ---------------------------------------------------------
FORMATS: Final[dict[str, int]] = {
    "int8": 0,
    "turbo4": 1,
    "fp16": 2,
    "turbo3": 3,
    "turbo2": 4,
    "fp8": 5,
    "bf16_rope_fp8_body": 6,
    "mlx4g32": 7,
    "fp32": 8,
    "bf16": 9,
}
FORMAT_NAMES: Final[dict[int, str]] = {code: name for name, code in FORMATS.items()}
BUILT_FORMATS: Final = ("fp16", "bf16", "fp32", "int8", "fp8", "mlx4g32", "turbo4", "turbo3", "turbo2")
"""Formats for a whole session or prefix; bf16_rope_fp8_body is given layer by layer, with its parameter."""
GROUP: Final = 32
FP16_MAX: Final = 65504.0


def turbo_blocks(dim: int, head: int) -> list[int]:
    """The blocks that a turbo row is split into: heads of `head` values where that divides, else the row as a whole.

    A piece whose odd factor is at most 15 is one block (up to 4096 values of a head, 128 of a row); of any other the
    largest power of two is split off.
    """
    given = head > 0 and dim % head == 0
    piece, most = (head, 4096) if given else (dim, 128)
    sizes: list[int] = []
    left = piece
    while left:
        odd = left // (left & -left)
        size = left if left <= most and odd <= 15 else min(most, 1 << (left.bit_length() - 1))
        sizes.append(size)
        left -= size
    return sizes * (dim // piece)


def row_bytes(fmt: int, dim: int) -> int:
    """Bytes of one stored row of `dim` values in the format `fmt`, as the compiled core counts them.

    `fmt` is code | parameter << 8. 0: the format does not take this dim or parameter. KeyError: no such format here.
    """
    code, param = fmt & 255, fmt >> 8
    groups = (dim + GROUP - 1) // GROUP
    if code not in FORMAT_NAMES:
        raise KeyError(fmt)
    if dim < 1:
        return 0
    if code in (1, 3, 4):
        bits = {1: 4, 3: 3, 4: 2}[code]
        return sum((bits * size + 7) // 8 + 2 for size in turbo_blocks(dim, param))
    if code == 6:
        return 2 * param + row_bytes(5, dim - param) if 0 < param < dim else 0
    if param or (code == 7 and dim % GROUP):
        return 0
    scaled = {0: dim + 4 * groups, 5: dim + 2 * groups, 7: dim // 2 + 4 * groups}
    return (scaled | {2: 2 * dim, 8: 4 * dim, 9: 2 * dim})[code]
