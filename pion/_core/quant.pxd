# The C interface of the row formats. It may change in a minor release.
from libc.stdint cimport int64_t


cdef extern from "quant.h" nogil:
    enum:
        Q_INT8
        Q_FP16
        Q_FP32
        Q_BF16
        Q_OK
        Q_REFUSED
        Q_UNSUPPORTED
        Q_GROUP
    size_t q_row_bytes(int code, size_t dim)
    int q_is_source(int code)
    int q_have_f16c()
    int q_encode(int src_code, int dst_code, const void *src, void *dst, size_t rows, size_t dim, int64_t *bad_row)
    int q_encode_with(
        int src_code, int dst_code, const void *src, void *dst, size_t rows, size_t dim, int64_t *bad_row, int f16c
    )
    int q_decode(int code, const void *src, void *dst_f32, size_t rows, size_t dim)
    int q_decode_with(int code, const void *src, void *dst_f32, size_t rows, size_t dim, int f16c)
