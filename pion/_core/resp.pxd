# The C interface may change in a minor release.
from libc.stdint cimport int64_t, uint8_t


cdef extern from "resp.h" nogil:
    enum:
        RESP_MORE
        RESP_FRAME
        RESP_BULK
        RESP_ERROR
        RESP_ERROR_MAX
        RESP_NUM_MAX
    size_t RESP_OFF_TAKEN

    struct resp_limits:
        size_t max_args
        size_t max_bulk
        size_t max_inline
        size_t max_command
        size_t big
        int unauthenticated

    const resp_limits RESP_LIMITS_UNAUTH
    const resp_limits RESP_LIMITS_DEFAULT

    struct resp_arg:
        size_t off
        size_t len

    struct resp_parser:
        const resp_limits *limits
        size_t pos
        size_t need
        resp_arg *args
        size_t nargs
        size_t cap
        size_t left
        size_t bulk_len
        uint8_t state
        uint8_t error

    void resp_init(resp_parser *p, const resp_limits *limits)
    void resp_free(resp_parser *p)
    void resp_next(resp_parser *p)
    bint resp_idle(const resp_parser *p)
    int resp_parse(resp_parser *p, char *d, size_t n)
    size_t resp_bulk_here(const resp_parser *p, size_t n)
    void resp_bulk_keep(resp_parser *p)
    size_t resp_bulk_take(resp_parser *p, char *d, size_t n)
    int resp_bulk_done(resp_parser *p)
    size_t resp_error_text(const resp_parser *p, char *out)
    bint resp_number(const char *s, size_t n, int64_t *out)
    bint resp_is(const char *s, size_t n, const char *upper, size_t m)
    size_t resp_put_num(char *out, char kind, int64_t v)
    size_t resp_put_bulk(char *out, const char *data, size_t n)
    size_t resp_put_null(char *out, int proto)
    size_t resp_put_line(char *out, char kind, const char *text, size_t n)


cdef class Encoder:
    cdef char *buf
    cdef size_t used, room
    cdef list parts
    cdef readonly int proto
    cdef int reserve(self, size_t n) except -1
    cdef int raw(self, const char *data, size_t n) except -1
    cdef int num(self, char kind, int64_t v) except -1
    cdef int bulk(self, object owner, const char *data, size_t n) except -1
    cdef int line(self, char kind, bytes text) except -1
    cdef int items(self, char kind, object values, int depth) except -1
    cdef int buffer(self, object value) except -1
    cdef int integer(self, object value) except -1
    cdef int value(self, object value, int depth) except -1
    cdef list take(self)


cpdef list encode_parts(object value, int proto)
cpdef bytes encode(object value, int proto)
