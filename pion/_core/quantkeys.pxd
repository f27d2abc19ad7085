# The C interface of the key forms. It may change in a minor release.
from libc.stdint cimport int64_t, uint64_t


cdef extern from "quant_keys.h" nogil:
    enum:
        QK_ROWS
    const uint64_t QK_POSITIONS
    size_t qk_block_bytes(int fmt, size_t dim)
    int qk_rope_fits(int fmt, size_t dim, double theta)
    int q_keys_encode(
        int src_code, int fmt, const void *src, void *dst, size_t groups, size_t dim, uint64_t first_row, double theta,
        int64_t *bad_row
    )
    int q_keys_decode(
        int fmt, const void *src, void *dst_f32, size_t groups, size_t dim, uint64_t first_row, double theta
    )
