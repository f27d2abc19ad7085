/* Incremental parser of RESP requests, and the few encoders a server needs in C.
 *
 * Theory of operation. The parser owns no bytes. It looks at a window that starts at the first byte of the
 * current frame; everything it remembers is an offset from there, so the owner may grow, move or compact the
 * window between two calls. Each byte is examined once: `pos` is the next undecided byte, `scan` is how far the
 * end of the current line was searched. Every decision depends on the bytes alone and never on how they were cut
 * into reads, so any split of the same bytes gives the same frames and the same error.
 *
 *   size_t start = ..., end = ...;                       window = buf[start, end)
 *   for (;;) switch (resp_parse(&p, buf + start, end - start)) {
 *     case RESP_FRAME:  p.nargs arguments at buf + start + p.args[i].off;  ... ; start += p.pos; resp_next(&p);
 *     case RESP_MORE:   if (!start..end) reset; make room for p.need bytes behind start; read; again
 *     case RESP_BULK:   argument number p.nargs has p.bulk_len bytes, resp_bulk_here() of them are in the window:
 *                         resp_bulk_keep(&p)             receive it into the window like any other argument, or
 *                         k = resp_bulk_here(&p, len)    copy k bytes at buf + start + p.pos elsewhere,
 *                         end -= resp_bulk_take(...)     cut them out of the window (moves what follows down),
 *                         ... receive p.bulk_len - k bytes wherever they belong, then resp_bulk_done(&p).
 *     case RESP_ERROR:  resp_error_text(&p, text); answer "-ERR <text>" and close. The state is final.
 *   }
 *
 * A frame of zero arguments ("*0", "*-1", an empty inline line) is RESP_FRAME with nargs == 0: no reply is due.
 * Inline commands are unquoted in place, so the window must be writable.
 */
#ifndef PION_RESP_H
#define PION_RESP_H

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { RESP_MORE = 0, RESP_FRAME = 1, RESP_BULK = 2, RESP_ERROR = -1 };

enum {
    RESP_E_NONE = 0,
    RESP_E_QUOTES,        /* unbalanced quotes in request */
    RESP_E_BIG_INLINE,    /* too big inline request */
    RESP_E_MULTIBULK,     /* invalid multibulk length */
    RESP_E_BULK,          /* invalid bulk length */
    RESP_E_BIG_MBULK,     /* too big mbulk count string */
    RESP_E_BIG_BULK,      /* too big bulk count string */
    RESP_E_DOLLAR,        /* expected '$', got 'c' */
    RESP_E_AUTH_MBULK,    /* unauthenticated multibulk length */
    RESP_E_AUTH_BULK,     /* unauthenticated bulk length */
    RESP_E_BUDGET,        /* more bytes than one command may hold in the window */
    RESP_E_MEMORY,        /* the argument table could not grow */
};

#define RESP_OFF_TAKEN SIZE_MAX /* args[i].off of a bulk that was received outside the window */
#define RESP_ERROR_MAX 96       /* room resp_error_text needs */
#define RESP_NUM_MAX 24         /* room resp_put_num needs */

struct resp_limits {
    size_t max_args;     /* arguments of one command (Redis: 1024 * 1024) */
    size_t max_bulk;     /* bytes of one argument (Redis: proto-max-bulk-len, 512 MiB) */
    size_t max_inline;   /* bytes of an inline command or a header line (Redis: 64 KiB) */
    size_t max_command;  /* bytes one command may occupy in the window; bulks taken elsewhere do not count */
    size_t big;          /* a bulk of at least this many bytes is announced by RESP_BULK; SIZE_MAX = never */
    int unauthenticated; /* only chooses the wording of the errors */
};

/* CVE-2021-32675: before AUTH a few bytes must not make us reserve memory; the figures are those of Redis. */
static const struct resp_limits RESP_LIMITS_UNAUTH = {10, 16384, 16384, 10 * (16384 + 32) + 64, SIZE_MAX, 1};
static const struct resp_limits RESP_LIMITS_DEFAULT = {1024 * 1024, (size_t)512 << 20, 65536, (size_t)256 << 20,
                                                       32768, 0};

struct resp_arg {
    size_t off; /* from the first byte of the frame, or RESP_OFF_TAKEN */
    size_t len;
};

#define RESP_INLINE_ARGS 8

struct resp_parser {
    const struct resp_limits *limits; /* may be exchanged between frames (AUTH) */
    size_t pos;                       /* frame bytes decided; the frame's length once complete */
    size_t scan;                      /* how far the end of the current line was searched */
    size_t need;                      /* after RESP_MORE: bytes the frame has at least; > len */
    struct resp_arg *args;            /* args[0 .. nargs) are complete */
    size_t nargs, cap;
    size_t left;     /* multibulk: arguments still to come */
    size_t bulk_len; /* the bulk being received */
    uint8_t state, error;
    unsigned char got; /* the byte found where '$' was due */
    struct resp_arg small[RESP_INLINE_ARGS];
};

enum { RESP_S_START = 0, RESP_S_COUNT, RESP_S_INLINE, RESP_S_LEN, RESP_S_ASK, RESP_S_BODY, RESP_S_TAKEN, RESP_S_CRLF,
       RESP_S_DONE, RESP_S_FAILED };

static inline void resp_init(struct resp_parser *p, const struct resp_limits *limits) {
    memset(p, 0, sizeof *p);
    p->limits = limits;
    p->args = p->small;
    p->cap = RESP_INLINE_ARGS;
}

static inline void resp_free(struct resp_parser *p) {
    if (p->args != p->small) free(p->args);
    p->args = p->small;
    p->cap = RESP_INLINE_ARGS;
    p->nargs = 0;
}

/* After RESP_FRAME: the next call of resp_parse starts a new frame at the first byte of its window. */
static inline void resp_next(struct resp_parser *p) {
    if (p->cap > 1024) resp_free(p); /* one command with many arguments must not keep its table */
    p->pos = p->scan = p->nargs = 0;
    p->state = RESP_S_START;
}

/* True when no byte of a frame was consumed: the connection may be idle. */
static inline int resp_idle(const struct resp_parser *p) { return p->state == RESP_S_START; }

static inline int resp_fail(struct resp_parser *p, int error) {
    p->state = RESP_S_FAILED;
    p->error = (uint8_t)error;
    return RESP_ERROR;
}

static inline int resp_more(struct resp_parser *p, size_t need) {
    p->need = need;
    return RESP_MORE;
}

/* Memory for the table follows the arguments received, never the count promised. */
static inline int resp_push(struct resp_parser *p, size_t off, size_t len) {
    if (p->nargs == p->cap) {
        size_t cap = p->cap * 2;
        struct resp_arg *args = (struct resp_arg *)realloc(p->args == p->small ? NULL : p->args, cap * sizeof *args);
        if (!args) return 0;
        if (p->args == p->small) memcpy(args, p->small, sizeof p->small);
        p->args = args;
        p->cap = cap;
    }
    p->args[p->nargs].off = off;
    p->args[p->nargs].len = len;
    p->nargs++;
    return 1;
}

/* Redis' string2ll: no sign but '-', no leading zero, no space, no "-0", nothing behind the digits. */
static inline int resp_number(const char *s, size_t n, int64_t *out) {
    if (n == 0 || n > 20) return 0;
    size_t i = 0;
    int negative = s[0] == '-';
    if (negative && ++i == n) return 0;
    if (s[i] == '0') {
        *out = 0;
        return n == 1;
    }
    uint64_t v = 0, top = negative ? (uint64_t)INT64_MAX + 1 : (uint64_t)INT64_MAX;
    for (; i < n; i++) {
        unsigned digit = (unsigned)(unsigned char)s[i] - '0';
        if (digit > 9 || v > (top - digit) / 10) return 0;
        v = v * 10 + digit;
    }
    *out = negative ? (int64_t)(0 - v) : (int64_t)v;
    return 1;
}

enum { RESP_LINE_MORE, RESP_LINE_OK, RESP_LINE_LONG, RESP_LINE_BAD };

/* Find the CRLF of the header line whose content starts at `from`. A lone CR or LF is an error at once: waiting for
 * a CR that never comes would leave the sender without an answer. */
static inline int resp_line(struct resp_parser *p, const char *d, size_t len, size_t from, size_t *eol) {
    size_t i = p->scan > from ? p->scan : from, max = p->limits->max_inline;
    for (; i < len; i++) {
        char c = d[i];
        if (c == '\r') {
            if (i + 1 == len) break;
            if (d[i + 1] != '\n') return RESP_LINE_BAD;
            *eol = i;
            return RESP_LINE_OK;
        }
        if (c == '\n') return RESP_LINE_BAD;
        if (i - from >= max) return RESP_LINE_LONG;
    }
    p->scan = i;
    return RESP_LINE_MORE;
}

static inline int resp_is_space(char c) { return c == ' ' || (c >= '\t' && c <= '\r'); }

static inline int resp_hex(char c) {
    if (c >= '0' && c <= '9') return c - '0';
    c |= 32;
    return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

/* Split one inline line by Redis' rules (sdssplitargs), unquoting in place: the result is never longer. */
static inline int resp_split_inline(struct resp_parser *p, char *d, size_t n) {
    const struct resp_limits *lim = p->limits;
    size_t i = 0;
    for (;;) {
        while (i < n && resp_is_space(d[i])) i++;
        if (i == n) return RESP_FRAME;
        size_t start = i, w = i;
        char quote = 0;
        for (;;) {
            if (i == n) {
                if (quote) return resp_fail(p, RESP_E_QUOTES);
                break;
            }
            char c = d[i];
            if (quote == '"' && c == '\\' && i + 1 < n) {
                char e = d[i + 1];
                int hi, lo;
                if (e == 'x' && i + 3 < n && (hi = resp_hex(d[i + 2])) >= 0 && (lo = resp_hex(d[i + 3])) >= 0) {
                    d[w++] = (char)(hi << 4 | lo);
                    i += 4;
                    continue;
                }
                d[w++] = e == 'n' ? '\n' : e == 'r' ? '\r' : e == 't' ? '\t' : e == 'b' ? '\b' : e == 'a' ? '\a' : e;
                i += 2;
            } else if (quote == '\'' && c == '\\' && i + 1 < n && d[i + 1] == '\'') {
                d[w++] = '\'';
                i += 2;
            } else if (quote) {
                i++;
                if (c != quote) {
                    d[w++] = c;
                    continue;
                }
                if (i < n && !resp_is_space(d[i])) return resp_fail(p, RESP_E_QUOTES);
                break; /* a closing quote ends the argument */
            } else if (c == '"' || c == '\'') {
                quote = c;
                i++;
            } else if (c == ' ' || c == '\n' || c == '\r' || c == '\t') {
                break;
            } else {
                d[w++] = c;
                i++;
            }
        }
        if (p->nargs >= lim->max_args) return resp_fail(p, lim->unauthenticated ? RESP_E_AUTH_MBULK : RESP_E_MULTIBULK);
        if (!resp_push(p, start, w - start)) return resp_fail(p, RESP_E_MEMORY);
    }
}

static inline int resp_inline(struct resp_parser *p, char *d, size_t len) {
    size_t max = p->limits->max_inline;
    size_t stop = len > max ? max + 1 : len; /* the newline may stand behind exactly `max` bytes */
    const char *nl = p->scan < stop ? (const char *)memchr(d + p->scan, '\n', stop - p->scan) : NULL;
    if (!nl) {
        if (len > max) return resp_fail(p, RESP_E_BIG_INLINE);
        p->scan = stop;
        return resp_more(p, len + 1);
    }
    size_t n = (size_t)(nl - d);
    p->pos = n + 1;
    if (n && d[n - 1] == '\r') n--;
    int rc = resp_split_inline(p, d, n);
    if (rc == RESP_FRAME) p->state = RESP_S_DONE;
    return rc;
}

/* How many bytes of the announced bulk are in the window of `len` bytes. */
static inline size_t resp_bulk_here(const struct resp_parser *p, size_t len) {
    size_t here = len > p->pos ? len - p->pos : 0;
    return here < p->bulk_len ? here : p->bulk_len;
}

/* After RESP_BULK: receive this argument into the window. */
static inline void resp_bulk_keep(struct resp_parser *p) { p->state = RESP_S_BODY; }

/* After RESP_BULK: the bulk goes elsewhere. Cuts its bytes out of the window (what stood behind them moves down) and
 * returns how many were cut; copy them first. Until resp_bulk_done no other byte may be added to the window. */
static inline size_t resp_bulk_take(struct resp_parser *p, char *d, size_t len) {
    size_t here = resp_bulk_here(p, len);
    memmove(d + p->pos, d + p->pos + here, len - p->pos - here);
    p->state = RESP_S_TAKEN;
    return here;
}

/* All bytes of the taken bulk have been received; the frame goes on with the CRLF behind it. */
static inline int resp_bulk_done(struct resp_parser *p) {
    if (!resp_push(p, RESP_OFF_TAKEN, p->bulk_len)) return resp_fail(p, RESP_E_MEMORY);
    p->state = RESP_S_CRLF;
    return RESP_MORE;
}

static inline int resp_parse(struct resp_parser *p, char *d, size_t len) {
    const struct resp_limits *lim = p->limits;
    size_t eol;
    int64_t n;
    for (;;) {
        switch (p->state) {
        case RESP_S_START:
            if (len == 0) return resp_more(p, 1);
            if (d[0] != '*') {
                p->state = RESP_S_INLINE;
                continue;
            }
            p->state = RESP_S_COUNT;
            p->scan = 1;
            /* fall through */
        case RESP_S_COUNT:
            switch (resp_line(p, d, len, 1, &eol)) {
            case RESP_LINE_MORE: return resp_more(p, len + 1);
            case RESP_LINE_LONG: return resp_fail(p, RESP_E_BIG_MBULK);
            case RESP_LINE_BAD: return resp_fail(p, RESP_E_MULTIBULK);
            }
            if (!resp_number(d + 1, eol - 1, &n)) return resp_fail(p, RESP_E_MULTIBULK);
            if (n > 0 && (uint64_t)n > lim->max_args)
                return resp_fail(p, lim->unauthenticated ? RESP_E_AUTH_MBULK : RESP_E_MULTIBULK);
            p->pos = p->scan = eol + 2;
            p->left = n > 0 ? (size_t)n : 0;
            if (!p->left) goto done;
            p->state = RESP_S_LEN;
            /* fall through */
        case RESP_S_LEN:
            if (p->pos >= len) return resp_more(p, p->pos + 4);
            if (d[p->pos] != '$') {
                p->got = (unsigned char)d[p->pos];
                return resp_fail(p, RESP_E_DOLLAR);
            }
            switch (resp_line(p, d, len, p->pos + 1, &eol)) {
            case RESP_LINE_MORE: return resp_more(p, len + 1);
            case RESP_LINE_LONG: return resp_fail(p, RESP_E_BIG_BULK);
            case RESP_LINE_BAD: return resp_fail(p, RESP_E_BULK);
            }
            if (!resp_number(d + p->pos + 1, eol - p->pos - 1, &n) || n < 0) return resp_fail(p, RESP_E_BULK);
            if ((uint64_t)n > lim->max_bulk)
                return resp_fail(p, lim->unauthenticated ? RESP_E_AUTH_BULK : RESP_E_BULK);
            p->bulk_len = (size_t)n;
            p->pos = p->scan = eol + 2;
            p->state = RESP_S_BODY;
            if (p->bulk_len >= lim->big) {
                p->state = RESP_S_ASK;
                return RESP_BULK;
            }
            /* fall through */
        case RESP_S_BODY:
            if (p->pos + p->bulk_len + 2 > lim->max_command) return resp_fail(p, RESP_E_BUDGET);
            if (len < p->pos + p->bulk_len) return resp_more(p, p->pos + p->bulk_len + 2);
            if (!resp_push(p, p->pos, p->bulk_len)) return resp_fail(p, RESP_E_MEMORY);
            p->pos += p->bulk_len;
            p->state = RESP_S_CRLF;
            /* fall through */
        case RESP_S_CRLF:
            /* Redis skips two bytes unseen; a wrong length would then be found much later, or never. */
            if (len > p->pos && d[p->pos] != '\r') return resp_fail(p, RESP_E_BULK);
            if (len < p->pos + 2) return resp_more(p, p->pos + 2);
            if (d[p->pos + 1] != '\n') return resp_fail(p, RESP_E_BULK);
            p->pos += 2;
            p->scan = p->pos;
            if (--p->left) {
                p->state = RESP_S_LEN;
                continue;
            }
            goto done;
        case RESP_S_INLINE: return resp_inline(p, d, len);
        case RESP_S_ASK: return RESP_BULK;
        case RESP_S_TAKEN: return resp_more(p, p->pos + 1);
        case RESP_S_DONE: return RESP_FRAME;
        default: return RESP_ERROR;
        }
    }
done:
    p->state = RESP_S_DONE;
    return RESP_FRAME;
}

/* The text behind "-ERR ", without CR or LF; at most RESP_ERROR_MAX bytes, not terminated. Returns its length. */
static inline size_t resp_error_text(const struct resp_parser *p, char *out) {
    static const char *const texts[] = {
        [RESP_E_NONE] = "",
        [RESP_E_QUOTES] = "unbalanced quotes in request",
        [RESP_E_BIG_INLINE] = "too big inline request",
        [RESP_E_MULTIBULK] = "invalid multibulk length",
        [RESP_E_BULK] = "invalid bulk length",
        [RESP_E_BIG_MBULK] = "too big mbulk count string",
        [RESP_E_BIG_BULK] = "too big bulk count string",
        [RESP_E_DOLLAR] = "expected '$', got ' '",
        [RESP_E_AUTH_MBULK] = "unauthenticated multibulk length",
        [RESP_E_AUTH_BULK] = "unauthenticated bulk length",
        [RESP_E_BUDGET] = "command exceeds the query buffer limit",
        [RESP_E_MEMORY] = "out of memory for the arguments",
    };
    static const char prefix[] = "Protocol error: ";
    size_t n = strlen(texts[p->error]);
    memcpy(out, prefix, sizeof prefix - 1);
    memcpy(out + sizeof prefix - 1, texts[p->error], n);
    n += sizeof prefix - 1;
    if (p->error == RESP_E_DOLLAR && p->got != '\r' && p->got != '\n') out[n - 2] = (char)p->got;
    return n;
}

/* Argument equals the upper-case ASCII word `upper`, in any case. */
static inline int resp_is(const char *s, size_t n, const char *upper, size_t m) {
    if (n != m) return 0;
    for (size_t i = 0; i < n; i++) {
        char c = s[i];
        if (c >= 'a' && c <= 'z') c = (char)(c - 32);
        if (c != upper[i]) return 0;
    }
    return 1;
}

/* ---- encoders: each returns the bytes written ---- */

/* "<kind><v>\r\n": ':' integers, '$' '*' '%' '~' '>' headers. At most RESP_NUM_MAX bytes. */
static inline size_t resp_put_num(char *out, char kind, int64_t v) {
    char digits[20];
    size_t k = 0, n = 0;
    uint64_t u = v < 0 ? 0 - (uint64_t)v : (uint64_t)v;
    do digits[k++] = (char)('0' + u % 10);
    while (u /= 10);
    out[n++] = kind;
    if (v < 0) out[n++] = '-';
    while (k) out[n++] = digits[--k];
    out[n++] = '\r';
    out[n++] = '\n';
    return n;
}

/* A whole bulk; `out` has room for n + RESP_NUM_MAX + 2 bytes. */
static inline size_t resp_put_bulk(char *out, const char *data, size_t n) {
    size_t at = resp_put_num(out, '$', (int64_t)n);
    memcpy(out + at, data, n);
    memcpy(out + at + n, "\r\n", 2);
    return at + n + 2;
}

/* The null bulk of the protocol version. At most 5 bytes. */
static inline size_t resp_put_null(char *out, int proto) {
    if (proto >= 3) {
        memcpy(out, "_\r\n", 3);
        return 3;
    }
    memcpy(out, "$-1\r\n", 5);
    return 5;
}

/* "+text\r\n" or "-text\r\n". CR and LF inside become spaces (as in Redis): a reply stays one line whatever a client
 * made us quote. `out` has room for n + 3 bytes. */
static inline size_t resp_put_line(char *out, char kind, const char *text, size_t n) {
    out[0] = kind;
    for (size_t i = 0; i < n; i++) out[1 + i] = text[i] == '\r' || text[i] == '\n' ? ' ' : text[i];
    out[n + 1] = '\r';
    out[n + 2] = '\n';
    return n + 3;
}

#endif
