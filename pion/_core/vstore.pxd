# cython: language_level=3
"""C declarations of vstore.h for other core modules. They may change in a minor release."""

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

from pion._core.framing cimport fr_header, fr_scan


cdef extern from "vstore.h" nogil:
    enum:
        VS_CHECKED, VS_STORE, VS_TRIM, VS_LAYERS, VS_PIECE, VS_ALIGN_FROM, VS_BIG_ALIGN, VS_GROUP, VS_LOOSE

    struct vs_extent:
        uint32_t start
        uint32_t count
        uint64_t offset
        uint64_t record

    struct vs_map:
        vs_extent *at
        uint32_t n
        uint32_t cap
        uint32_t tokens
        uint32_t stride
        uint32_t unchecked
        uint32_t group
        uint64_t live

    int vs_format(const fr_header *h)
    void vs_set_format(fr_header *h, int fmt)
    bint vs_is_keys(int fmt)
    void vs_free(vs_map *m)
    uint32_t vs_find(const vs_map *m, uint32_t row)
    int vs_room(vs_map *m)
    uint64_t vs_put(vs_map *m, uint32_t start, uint32_t count, uint64_t offset, uint64_t record)
    uint64_t vs_splice(vs_map *m, uint32_t start, uint32_t end, const vs_extent *fresh)
    uint64_t vs_trim(vs_map *m, uint32_t rows)
    void vs_next(const vs_map *m, uint32_t *i, uint32_t *row, uint32_t end, int *hit, uint64_t *offset, uint32_t *rows)
    int vs_next_of_two(const vs_map *sealed, const vs_map *loose, uint32_t *row, uint32_t end, uint64_t *offset,
                       uint32_t *rows)
    uint64_t vs_hidden(const vs_map *sealed, const vs_map *loose)
    int vs_write_record(int fd, uint64_t offset, fr_header *h, const void *payload, uint32_t seed)
    int vs_check_record(int fd, uint64_t offset, uint32_t seed)
    int vs_merge(const vs_map *m, uint32_t i, uint32_t j, int src, int dst, uint64_t at, fr_header *h,
                 uint32_t seed, uint8_t *buf, uint64_t *total)
    int vs_recode(int src, uint64_t at, fr_header *h, const uint8_t *attrs, uint32_t seed, int dst,
                  uint64_t dst_at, uint32_t dst_seed, uint8_t *buf)
    int vs_convert(int fd, uint64_t at, uint64_t rows, uint32_t dim, int source, int target, uint32_t seed,
                   uint8_t *inbuf, uint8_t *outbuf, uint32_t *crc, int64_t *bad)
    int vs_convert_keys(int fd, uint64_t rows_at, uint64_t at, uint64_t groups, uint32_t dim, int source, int target,
                        uint64_t first, double theta, uint32_t seed, uint32_t *crc, int64_t *bad)
    int64_t vs_beyond(const uint8_t *words, size_t n, uint32_t limit)
    void vs_clamp(float *values, size_t n)
    void vs_writeback(int fd)
    int vs_flush(int fd)


cdef class Rows:
    cdef vs_map *maps[4]    # by side; then the loose rows of each side
    cdef int used[4]
    cdef readonly uint64_t dead
    cdef readonly uint64_t last

    cdef vs_map *_map(self, int side, Py_ssize_t layer) noexcept nogil
    cdef vs_map *_grow(self, int side, Py_ssize_t layer) noexcept nogil
    cdef int _take(self, int side, Py_ssize_t layer, uint32_t start, uint32_t count, uint64_t offset, uint64_t record,
                   uint32_t stride) noexcept nogil
    cdef int _take_record(self, const fr_header *h, uint64_t at) noexcept nogil
    cdef int _cut(self, const fr_header *h) noexcept nogil
    cdef int _unloose(self, int side, Py_ssize_t layer, uint32_t start, uint32_t count) noexcept nogil
    cdef int _put(self, int side, Py_ssize_t layer, uint32_t start, uint32_t count, uint64_t offset, uint64_t record,
                  uint32_t stride) except -1
    cdef uint32_t _tokens(self, int side, Py_ssize_t layer) noexcept nogil
    cdef uint64_t _live(self, int side, Py_ssize_t layer) noexcept nogil
    cdef void _trim(self, int side, Py_ssize_t layer, uint32_t rows) noexcept nogil
    cdef int _scan_rows(self, fr_scan *s, fr_header *h, const uint8_t **attrs) noexcept nogil
    cdef int _merge(self, Rows fresh, int src, int dst, uint64_t *at, uint32_t seed, const int *fmt,
                    const uint32_t *dim, uint8_t *buf) noexcept nogil
    cdef int _copy_rows(self, int src, fr_scan *s, fr_header *h, const uint8_t **attrs, uint32_t seed, int dst,
                        uint64_t *at, uint32_t dst_seed, uint8_t *buf) noexcept nogil
