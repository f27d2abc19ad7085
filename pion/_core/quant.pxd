# The C interface of the row formats. It may change in a minor release.
from libc.stdint cimport int64_t


cdef extern from "quant.h" nogil:
    enum:
        Q_INT8
        Q_TURBO4
        Q_TURBO3
        Q_TURBO2
        Q_FP8
        Q_BF16_ROPE_FP8_BODY
        Q_MLX4G32
        Q_FP16
        Q_FP32
        Q_BF16
        Q_OK
        Q_REFUSED
        Q_UNSUPPORTED
        Q_GROUP
        Q_KTURBO4
        Q_KTURBO3
        Q_KTURBO2
        Q_KEY_ROWS
    int q_code(int fmt)
    size_t q_param(int fmt)
    size_t q_key_bits(int fmt)
    int q_group_rows(int fmt)
    size_t q_row_bytes(int fmt, size_t dim)
    int q_is_source(int fmt)
    int q_have_f16c()
    int q_encode(int src_fmt, int dst_fmt, const void *src, void *dst, size_t rows, size_t dim, int64_t *bad_row)
    int q_encode_with(
        int src_fmt, int dst_fmt, const void *src, void *dst, size_t rows, size_t dim, int64_t *bad_row, int f16c
    )
    void q_fp32_to_e4m3(const unsigned char *src, unsigned char *dst, size_t n)
    void q_e4m3_to_fp32(const unsigned char *src, unsigned char *dst, size_t n)
    int q_decode(int fmt, const void *src, void *dst_f32, size_t rows, size_t dim)
    int q_decode_with(int fmt, const void *src, void *dst_f32, size_t rows, size_t dim, int f16c)

cdef extern from "heads.h" nogil:
    void heads_split(const void *src, void *dst, size_t rows, size_t heads, size_t bytes)
