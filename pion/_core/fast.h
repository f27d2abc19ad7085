/* The commands that run without Python: PING ECHO GET SET DEL EXISTS INCR MGET KV.PREFIX.MEMBERSHIP.
 *
 * One function serves both doors: the plane calls it for frames it meets, Plane.exec_fast for the Python handler of the same
 * command. It answers FAST_SLOW, and has then changed nothing, for everything it does not decide itself: a wrong number of
 * arguments, options, values of the wrong type, large values that are not loaded, a namespace without a table, writes that
 * fail. The Python handler words those replies.
 */
#ifndef PION_FAST_H
#define PION_FAST_H

#include "conn.h"
#include "kevict.h"
#include "membership.h"

enum { FAST_STREAM = 0, FAST_PING, FAST_ECHO, FAST_GET, FAST_SET, FAST_DEL, FAST_EXISTS, FAST_INCR, FAST_MGET,
       FAST_MEMBERSHIP, FAST_COUNT };
enum { FLAG_WRITE = 1, FLAG_DENYOOM = 2 };
enum { FAST_DONE = 0, FAST_SLOW = 1 };

#define FAST_MAX_HASHES 16384     /* about 80 us of plane time; more go to a thread */
#define FAST_MAX_KEYS 4096        /* a longer DEL, EXISTS or MGET takes the Python door, where it can be split */

typedef struct fast_arg {
    const char *p;
    size_t n;
} fast_arg;

/* One call: the arguments lie in a connection's window, or (Python door) in an array. */
typedef struct fast_call {
    plane *plane;
    conn *conn;
    outq *out;
    const fast_arg *direct;
    size_t argc;
} fast_call;

static inline fast_arg fast__arg(const fast_call *f, size_t i) {
    if (f->direct) return f->direct[i];
    fast_arg a;
    a.p = conn_arg(f->conn, i, &a.n);
    return a;
}

static inline void fast__int(fast_call *f, int64_t v) {
    char *to = outq_room(f->out, &f->plane->spares, RESP_NUM_MAX);
    if (to) outq_trim(f->out, RESP_NUM_MAX - resp_put_num(to, ':', v));
}

static inline void fast__null(fast_call *f) {
    char text[8];
    outq_put(f->out, &f->plane->spares, text, resp_put_null(text, f->conn->proto));
}

static inline void fast__text(fast_call *f, const char *text) { outq_put(f->out, &f->plane->spares, text, strlen(text)); }

static inline void fast__bulk(fast_call *f, const char *p, size_t n) {
    char *to = outq_room(f->out, &f->plane->spares, n + RESP_NUM_MAX + 2);
    if (to) outq_trim(f->out, n + RESP_NUM_MAX + 2 - resp_put_bulk(to, p, n));
}

static inline kent *fast__read(fast_call *f, size_t i) {
    fast_arg key = fast__arg(f, i);
    return ks_read(f->plane->keyspace, f->conn->db, key.p, key.n, f->plane->now_ms);
}

/* A string whose bytes are in memory. */
static inline int fast__loaded(const kent *e) {
    return e->type == KS_STRING && !(((const kval *)e->value)->flags & KV_GHOST);
}

static inline int fast__get(fast_call *f) {
    fast_arg key = fast__arg(f, 1);
    ks *k = f->plane->keyspace;
    kent *e = ks_find(k, f->conn->db, key.p, key.n, f->plane->now_ms);
    if (!e) {
        k->misses++;
        fast__null(f);
        return FAST_DONE;
    }
    if (!fast__loaded(e)) return FAST_SLOW;
    k->hits++;
    e->clock = ks_clock(f->plane->now_ms);
    outq_put_value(f->out, &f->plane->spares, (kval *)e->value);
    return FAST_DONE;
}

static inline int fast__set(fast_call *f) {
    ks *k = f->plane->keyspace;
    int db = f->conn->db, rc;
    fast_arg key = fast__arg(f, 1);
    if (!f->direct && f->conn->body) {
        kval_ref(f->conn->body);
        rc = ks_set(k, db, key.p, key.n, f->conn->body, 0, 0);
    } else {
        fast_arg value = fast__arg(f, 2);
        rc = ks_set_bytes(k, db, key.p, key.n, value.p, value.n, 0, 0);
    }
    if (rc) return FAST_SLOW; /* nothing changed; the Python door says what went wrong */
    outq_put(f->out, &f->plane->spares, "+OK\r\n", 5);
    return FAST_DONE;
}

static inline int fast__del(fast_call *f) {
    int64_t n = 0;
    if (f->argc > FAST_MAX_KEYS) return FAST_SLOW;
    for (size_t i = 1; i < f->argc; i++) {
        fast_arg key = fast__arg(f, i);
        n += ks_del(f->plane->keyspace, f->conn->db, key.p, key.n);
    }
    fast__int(f, n);
    return FAST_DONE;
}

static inline int fast__exists(fast_call *f) {
    int64_t n = 0;
    if (f->argc > FAST_MAX_KEYS) return FAST_SLOW;
    for (size_t i = 1; i < f->argc; i++) n += fast__read(f, i) != NULL;
    fast__int(f, n);
    return FAST_DONE;
}

static inline int fast__incr(fast_call *f) {
    int64_t result;
    fast_arg key = fast__arg(f, 1);
    if (ks_incr(f->plane->keyspace, f->conn->db, key.p, key.n, 1, &result)) return FAST_SLOW;
    fast__int(f, result);
    return FAST_DONE;
}

static inline int fast__mget(fast_call *f) {
    char head[RESP_NUM_MAX];
    ks *k = f->plane->keyspace;
    if (f->argc > FAST_MAX_KEYS) return FAST_SLOW;
    for (size_t i = 1; i < f->argc; i++) {
        fast_arg key = fast__arg(f, i);
        kent *e = ks_find(k, f->conn->db, key.p, key.n, f->plane->now_ms);
        if (e && e->type == KS_STRING && !fast__loaded(e)) return FAST_SLOW;
    }
    outq_put(f->out, &f->plane->spares, head, resp_put_num(head, '*', (int64_t)f->argc - 1));
    for (size_t i = 1; i < f->argc; i++) {
        kent *e = fast__read(f, i);
        if (e && e->type == KS_STRING) outq_put_value(f->out, &f->plane->spares, (kval *)e->value);
        else fast__null(f);
    }
    return FAST_DONE;
}

static inline int fast__membership(fast_call *f) {
    fast_arg ns = fast__arg(f, 1), count = fast__arg(f, 2), hashes = fast__arg(f, 3);
    int64_t n;
    if (!resp_number(count.p, count.n, &n) || n < 0 || n > FAST_MAX_HASHES || hashes.n != (size_t)n * 8) return FAST_SLOW;
    kval *table = ks_table_get(f->plane->keyspace, ns.p, ns.n, f->plane->now_ms);
    if (!table) return FAST_SLOW;
    size_t bytes = (size_t)(n + 7) / 8, room = bytes + RESP_NUM_MAX + 2;
    char *to = outq_room(f->out, &f->plane->spares, room);
    size_t at = to ? resp_put_num(to, '$', (int64_t)bytes) : 0;
    int rc = to ? mt_probe(table->data, table->len, hashes.p, (size_t)n, (uint8_t *)to + at) : 0;
    kval_unref(table);
    if (!to) return FAST_DONE;
    if (rc) {
        outq_trim(f->out, room);
        return FAST_SLOW;
    }
    memcpy(to + at + bytes, "\r\n", 2);
    outq_trim(f->out, room - at - bytes - 2);
    return FAST_DONE;
}

static inline int fast_exec(fast_call *f, int id) {
    switch (id) {
    case FAST_PING:
        if (f->argc == 1) {
            outq_put(f->out, &f->plane->spares, "+PONG\r\n", 7);
            return FAST_DONE;
        }
        if (f->argc != 2) return FAST_SLOW;
        /* fall through */
    case FAST_ECHO: {
        fast_arg text = fast__arg(f, 1);
        fast__bulk(f, text.p, text.n);
        return FAST_DONE;
    }
    case FAST_GET: return fast__get(f);
    case FAST_SET: return f->argc == 3 ? fast__set(f) : FAST_SLOW;
    case FAST_DEL: return fast__del(f);
    case FAST_EXISTS: return fast__exists(f);
    case FAST_INCR: return f->argc == 2 ? fast__incr(f) : FAST_SLOW;
    case FAST_MGET: return fast__mget(f);
    case FAST_MEMBERSHIP: return f->argc == 4 ? fast__membership(f) : FAST_SLOW;
    default: return FAST_SLOW;
    }
}

/* ---- the table ---------------------------------------------------------------------------------------------------------- */

static inline unsigned fast__hash(const char *name, size_t n) {
    unsigned char first = (unsigned char)name[0] & 0xdf, last = (unsigned char)name[n - 1] & 0xdf;
    return ((unsigned)n * 7u + first * 3u + last) % FAST_SLOTS;
}

/* The record of a command name in any case, or NULL. */
static inline fast_cmd *fast_find(plane *p, const char *name, size_t n) {
    if (n == 0 || n >= sizeof p->fast[0].name) return NULL;
    for (unsigned i = fast__hash(name, n); p->fast[i].len; i = (i + 1) % FAST_SLOTS)
        if (p->fast[i].len == n && resp_is(name, n, p->fast[i].name, n)) return &p->fast[i];
    return NULL;
}

/* `name` in upper case, shorter than 32 bytes. 0, or -EINVAL. */
static inline int fast_add(plane *p, int id, const char *name, size_t n, int arity, int flags) {
    size_t used = 0;
    for (unsigned i = 0; i < FAST_SLOTS; i++) used += p->fast[i].len != 0;
    if (n == 0 || n >= sizeof p->fast[0].name || used >= FAST_SLOTS / 2 || id <= FAST_STREAM || id >= FAST_COUNT) return -EINVAL;
    unsigned i = fast__hash(name, n);
    while (p->fast[i].len) i = (i + 1) % FAST_SLOTS;
    fast_cmd *cmd = &p->fast[i];
    for (size_t k = 0; k < n; k++) {
        cmd->name[k] = name[k];
        cmd->lower[k] = name[k] >= 'A' && name[k] <= 'Z' ? (char)(name[k] + 32) : name[k];
    }
    cmd->len = (uint8_t)n;
    cmd->id = id;
    cmd->arity = arity;
    cmd->flags = flags;
    return 0;
}

/* The argument `arg` of `name` (upper case) may go straight to a file. 0, or -EINVAL. */
static inline int stream_add(plane *p, const char *name, size_t n, size_t arg) {
    if (n == 0 || n >= sizeof p->streams[0].name || p->nstreams == FAST_SLOTS || arg == 0) return -EINVAL;
    stream_cmd *cmd = &p->streams[p->nstreams++];
    memcpy(cmd->name, name, n);
    cmd->len = (uint8_t)n;
    cmd->arg = arg;
    return 0;
}

static inline int fast_arity_ok(const fast_cmd *cmd, size_t argc) {
    return cmd->arity >= 0 ? argc == (size_t)cmd->arity : argc >= (size_t)-cmd->arity;
}

#endif
