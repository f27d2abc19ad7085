"""C declarations of framing.h and crc32c.h for other core modules. They may change in a minor release."""

from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t, uint64_t


cdef extern from "crc32c.h" nogil:
    uint32_t c_crc32c "crc32c"(uint32_t crc, const void *data, size_t n)
    uint32_t c_crc32c_portable "crc32c_portable"(uint32_t crc, const void *data, size_t n)
    uint32_t c_crc32c_combine "crc32c_combine"(uint32_t crc_a, uint32_t crc_b, uint64_t length_b)


cdef extern from "framing.h" nogil:
    enum:
        FR_MAGIC, FR_VERSION, FR_HEADER, FR_ALIGN, FR_ATTRS_MAX, FR_PAYLOAD_MAX, FR_KIND_FILE
        FR_LOG_HEADER, FR_LOG_FIXED, FR_LOG_MAX
        FR_PENDING, FR_VALID, FR_DEAD
        FR_OK, FR_END, FR_SHORT, FR_ZEROS, FR_BAD_MAGIC, FR_NEWER, FR_BAD_CRC, FR_BAD_FIELD, FR_TORN, FR_IO

    struct fr_header:
        uint64_t payload_len
        uint64_t token
        uint32_t header_len
        uint32_t attrs_len
        uint32_t start
        uint32_t count
        uint32_t dim
        uint32_t aux
        uint32_t payload_crc
        uint16_t layer
        uint8_t kind
        uint8_t state
        uint8_t flags
        uint8_t side
        uint8_t fmt

    struct fr_scan:
        int error
        uint64_t offset
        uint64_t end

    struct fr_log:
        uint64_t expire
        const uint8_t *key
        const uint8_t *value
        uint32_t klen
        uint32_t vlen
        uint32_t total
        uint8_t kind
        uint8_t db

    void fr_put32(uint8_t *p, uint32_t v)
    void fr_put64(uint8_t *p, uint64_t v)
    uint32_t fr_get32(const uint8_t *p)
    uint64_t fr_get64(const uint8_t *p)
    ssize_t fr_pread(int fd, void *buf, size_t n, uint64_t offset)
    uint64_t fr_round(uint64_t n, uint64_t align)
    uint32_t fr_seed(uint64_t generation)
    uint64_t fr_total(const fr_header *h)
    uint32_t fr_header_len(uint64_t offset, uint32_t attrs_len, uint32_t align)
    void fr_encode(uint8_t *out, const fr_header *h, const uint8_t *attrs, uint32_t seed)
    int fr_decode(const uint8_t *p, size_t n, uint32_t seed, fr_header *h)
    int fr_scan_init(fr_scan *s, int fd, uint64_t offset, uint64_t end, uint32_t seed)
    void fr_scan_free(fr_scan *s)
    int fr_scan_here(fr_scan *s, fr_header *h, const uint8_t **attrs)
    int64_t fr_resync(fr_scan *s, uint64_t offset)
    int fr_crc_file(int fd, uint64_t offset, uint64_t n, uint32_t seed, uint32_t *crc)
    void fr_log_encode(uint8_t *out, uint8_t kind, uint8_t db, const void *key, uint32_t klen,
                       const void *value, uint32_t vlen, uint64_t expire, uint32_t seed)
    int fr_log_decode(const uint8_t *p, size_t n, uint32_t seed, fr_log *r)


cdef class Header:
    cdef fr_header h
    cdef readonly bytes attrs
    cdef readonly uint64_t offset


cdef class Scanner:
    cdef fr_scan s
    cdef bint verify
    cdef readonly str reason
