/* One connection and the plane it belongs to: their state, the input window, the lists that drive a batch.
 *
 * Ownership. A connection is touched by one thread at a time: by the plane's (AT_HOME), or by one mover (AT_MOVER). It is
 * handed over through the movers' queue and handed back through plane.returned, both under a lock. While a mover has it,
 * the plane reads only `where`, `id` and the byte counters and writes only the atomic `kill`.
 *
 * Input. A window of bytes [start, end) begins with the frame being parsed. A connection without half a frame owns no
 * buffer: it reads into the plane's shared one and copies only what is left over. Bodies do not pass through the window:
 * `body` is a value on its way into the keyspace, `sink` one on its way into a file.
 */
#ifndef PION_CONN_H
#define PION_CONN_H

#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "ev.h"
#include "jobs.h"
#include "keyspace.h"
#include "resp.h"
#include "slots.h"
#include "stream.h"

#define CONN_SHARED (64u * 1024)
#define CONN_FIRST (16u * 1024)
#define CONN_LINGER_BYTES (16u * 1024 * 1024)
#define FAST_SLOTS 64

enum { AT_HOME = 0, AT_MOVER, AT_END };
enum { CLOSE_NO = 0, CLOSE_FLUSH /* after the output has left */, CLOSE_LINGER /* FIN sent, input thrown away */ };
enum { BLOB_NO = 0, BLOB_WANTED, BLOB_STREAM /* as it is received */, BLOB_WRITTEN };
enum { WAIT_NO = 0, WAIT_FRAME /* a complete frame for Python */, WAIT_STREAM /* where does this body go? */,
       WAIT_PLACE /* Python tells that later: until then it stays with the peer */ };

struct plane;

typedef struct conn {
    job work;                  /* first member: movers get the connection from its job */
    struct plane *plane;
    void *py;                  /* the Python object, borrowed: the plane keeps it alive */
    uint64_t id;
    int fd;                    /* -1: a connection without a descriptor */
    uint8_t where, interest, closing, waiting;
    uint8_t eof;               /* the peer sends no more */
    uint8_t hup;               /* ... seen while input was not wanted */
    uint8_t pending;           /* a reply comes later; no further frame is parsed */
    uint8_t stalled;           /* output at its bounds; no further frame is parsed */
    uint8_t full, dry;         /* a mover found the socket full / without input: it waits for an event */
    uint8_t in_slow, in_ready, touched, borrowed;
    uint8_t wrote;             /* a command of this batch logged something */
    uint8_t authed, fast, proto, db;
    _Atomic uint8_t kill;      /* end it when the mover brings it back */
    int error;                 /* errno the mover met */

    char *in;
    size_t start, end, cap;
    struct resp_parser parser;
    kval *body;                /* SET: the value being received */
    size_t body_got, body_counted; /* bytes received, and in the plane's input_bytes */
    sink *sink;                /* the streamed argument of the current frame */
    char *early;               /* its bytes that came with the header */
    size_t early_n;
    uint8_t body_ready;        /* body (or sink) is complete and belongs to the frame */
    uint8_t blob;              /* BLOB_*: the file of a large body, written before the log record that names it */
    int blob_dir, blob_durable, blob_fd; /* the descriptor of BLOB_STREAM, -1 until there is something to write */
    size_t blob_at;            /* bytes of the body in its file so far */
    uint64_t blob_id;
    uint32_t blob_crc;

    outq out;
    uint64_t mark;             /* out.queued before the reply to the first write of this batch */
    size_t replies;            /* queued since then */
    uint64_t log_at;           /* position of the log when Python got the current frame */
    uint64_t progress_ns;      /* last time output moved */
    uint64_t linger_ns;
    size_t lingered;

    uint64_t commands;
    _Atomic uint64_t net_in, net_out;    /* movers count too */
    uint64_t created_ns, active_ns;
    const char *last_cmd;
    struct conn *next_returned;
    size_t index;              /* in plane.all */
} conn;

typedef struct conn_list {     /* room for every connection: pushing never fails */
    conn **items;
    size_t n, cap;
} conn_list;

typedef struct fast_cmd {
    char name[32], lower[32];
    uint8_t len;
    int id, arity, flags;
    uint64_t calls;
} fast_cmd;

typedef struct stream_cmd {
    char name[32];
    uint8_t len;
    size_t arg;
} stream_cmd;

typedef struct plane_limits {
    struct resp_limits parse;
    size_t preauth_output, max_output, max_slots, input_total, output_total, slice, stream_min;
    uint64_t batch_ns, dwell_ns, send_timeout_ns, linger_ns;
} plane_limits;

typedef struct plane {
    ev ev;
    ev_event events[EV_BATCH];
    int event_i, event_n;
    ks *keyspace;
    plane_limits limits;
    uint8_t fast_enabled;
    uint8_t tight;             /* the replies of all connections together are at their bound */
    fast_cmd fast[FAST_SLOTS];
    stream_cmd streams[FAST_SLOTS];
    int nstreams;

    conn_list all, ready, running, touched, dead;
    conn **slow;               /* ring of connections that wait for Python */
    size_t slow_head, slow_n, slow_cap;

    jobs *movers;
    pthread_mutex_t lock;      /* guards returned */
    conn *returned;
    size_t lent;

    char *shared;
    scratch scratch;
    size_t turn_first;         /* which busy sender goes first in the next flush */
    spares spares;
    pyheap pydead;             /* objects to be given back under the GIL */
    size_t pinned;             /* objects in all queues and in pydead */
    size_t input_bytes;        /* of half-received commands */
    uint64_t now_ms;
    uint64_t now_ns;
    uint64_t next_id;
    uint64_t total_connections, commands, net_in, net_out, aborted, timed_out, overflowed;
} plane;

/* ---- lists ---------------------------------------------------------------------------------------------------------- */

static inline int conn_list_reserve(conn_list *l, size_t cap) {
    if (l->cap >= cap) return 0;
    conn **items = (conn **)realloc(l->items, cap * sizeof *items);
    if (!items) return -ENOMEM;
    l->items = items;
    l->cap = cap;
    return 0;
}

static inline void conn_list_remove(conn_list *l, conn *c) {
    size_t kept = 0;
    for (size_t i = 0; i < l->n; i++)
        if (l->items[i] != c) l->items[kept++] = l->items[i];
    l->n = kept;
}

/* Room in every list for one more connection. */
static inline int plane_reserve(plane *p) {
    size_t want = p->all.n + p->dead.n + 1, cap = p->all.cap;
    if (cap >= want) return 0;
    cap = cap ? cap : 64;
    while (cap < want) cap *= 2;
    if (conn_list_reserve(&p->ready, cap) || conn_list_reserve(&p->running, cap) || conn_list_reserve(&p->touched, cap) ||
        conn_list_reserve(&p->dead, cap) || conn_list_reserve(&p->all, cap))
        return -ENOMEM;
    conn **ring = (conn **)malloc(cap * sizeof *ring);
    if (!ring) {
        p->all.cap = p->slow_cap;
        return -ENOMEM;
    }
    for (size_t i = 0; i < p->slow_n; i++) ring[i] = p->slow[(p->slow_head + i) % p->slow_cap];
    free(p->slow);
    p->slow = ring;
    p->slow_head = 0;
    p->slow_cap = cap;
    return 0;
}

static inline void plane_push_slow(plane *p, conn *c) {
    if (c->in_slow) return;
    c->in_slow = 1;
    p->slow[(p->slow_head + p->slow_n++) % p->slow_cap] = c;
}

static inline conn *plane_pop_slow(plane *p) {
    if (!p->slow_n) return NULL;
    conn *c = p->slow[p->slow_head];
    p->slow_head = (p->slow_head + 1) % p->slow_cap;
    p->slow_n--;
    c->in_slow = 0;
    return c;
}

static inline void plane_push_ready(plane *p, conn *c) {
    if (c->in_ready) return;
    c->in_ready = 1;
    p->ready.items[p->ready.n++] = c;
}

/* From here to the next flush the connection's replies may still be taken back: see plane_flush. */
static inline void plane_touch(plane *p, conn *c) {
    if (c->touched) return;
    c->touched = 1;
    c->wrote = 0;
    p->touched.items[p->touched.n++] = c;
}

/* A command logged something; its reply, and those that follow it, begin at `queued`. */
static inline void conn_wrote(conn *c, uint64_t queued) {
    if (c->wrote) return;
    c->wrote = 1;
    c->mark = queued;
    c->replies = 0;
}

/* ---- the input window ------------------------------------------------------------------------------------------------- */

static inline void conn_drop_window(conn *c) {
    if (!c->borrowed && c->in) {
        c->plane->input_bytes -= c->cap;
        free(c->in);
    }
    c->in = NULL;
    c->start = c->end = c->cap = 0;
    c->borrowed = 0;
}

/* After a run: a borrowed window goes back, what is left of it into a buffer of the connection's own. 0 or -ENOMEM. */
static inline int conn_keep_window(conn *c) {
    size_t left = c->end - c->start;
    if (!left) {
        conn_drop_window(c);
        return 0;
    }
    if (!c->borrowed) return 0;
    char *own = (char *)malloc(left);
    if (own) memcpy(own, c->in + c->start, left);
    conn_drop_window(c);
    if (!own) return -ENOMEM;
    c->in = own;
    c->end = c->cap = left;
    c->plane->input_bytes += left;
    return 0;
}

/* Make room behind the window for what the frame needs at least, but never for more than was received so far plus a
 * little: a client pays for memory with bytes. 0, -ENOMEM, or -ENOBUFS at the bound over all connections. */
static inline int conn_room(conn *c, size_t least) {
    plane *p = c->plane;
    size_t held = c->end - c->start;
    size_t want = c->parser.need > held + least ? c->parser.need : held + least;
    size_t most = held + (held > CONN_FIRST ? held : CONN_FIRST);
    if (want > most) want = most > held + least ? most : held + least;
    if (c->cap - c->start >= want && c->cap > c->end) return 0;
    if (c->cap >= want) {
        memmove(c->in, c->in + c->start, held);
        c->start = 0;
        c->end = held;
        return 0;
    }
    if (p->input_bytes - c->cap + want > p->limits.input_total) return -ENOBUFS;
    char *bigger;
    if (c->start == 0 && c->in) {
        bigger = (char *)realloc(c->in, want);
        if (!bigger) return -ENOMEM;
    } else {
        bigger = (char *)malloc(want);
        if (!bigger) return -ENOMEM;
        if (held) memcpy(bigger, c->in + c->start, held);
        free(c->in);
    }
    p->input_bytes += want - c->cap;
    c->in = bigger;
    c->start = 0;
    c->end = held;
    c->cap = want;
    return 0;
}

static inline const char *conn_arg(const conn *c, size_t i, size_t *n) {
    const struct resp_arg *a = &c->parser.args[i];
    *n = a->len;
    if (a->off == RESP_OFF_TAKEN) return c->body ? c->body->data : NULL;
    return c->in + c->start + a->off;
}

/* After a login or its loss; a frame that has begun keeps the limits it began with. */
static inline void conn_set_limits(conn *c) {
    if (resp_idle(&c->parser)) c->parser.limits = c->authed ? &c->plane->limits.parse : &RESP_LIMITS_UNAUTH;
}

static inline spares *plane_spares(plane *p) { return &p->spares; }

/* Let go of a body. Its file, if the keyspace did not take it over, goes too. */
static inline void conn_drop_body(conn *c) {
    if (!c->body) return;
    if (c->blob == BLOB_WRITTEN) klog_drop_blob(&c->plane->keyspace->log, c->blob_id);
    if (c->blob == BLOB_STREAM && c->blob_fd >= 0) ks_blob_close(c->blob_dir, c->blob_id, c->blob_fd, -ECANCELED);
    c->blob = BLOB_NO;
    c->plane->input_bytes -= c->body_counted;
    c->body_counted = 0;
    kval_unref(c->body);
    c->body = NULL;
    c->body_got = 0;
}

/* Step over the current frame and let go of its bodies. */
static inline void conn_consume(conn *c) {
    c->start += c->parser.pos;
    resp_next(&c->parser);
    conn_set_limits(c);
    c->body_ready = 0;
    conn_drop_body(c);
    if (c->sink) {
        sink_unref(c->sink);
        c->sink = NULL;
    }
}

static inline int conn_output_full(const conn *c) {
    const plane_limits *l = &c->plane->limits;
    return c->out.ram >= l->max_output || outq_len(&c->out) >= l->max_slots || (c->plane->tight && c->out.ram > CONN_SHARED);
}

static inline void conn_count(_Atomic uint64_t *counter, uint64_t n) {
    atomic_fetch_add_explicit(counter, n, memory_order_relaxed);
}

#endif
