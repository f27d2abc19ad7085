/* Movers: threads that carry a connection's file bodies, both ways, while they own it.
 *
 * A lent connection has output that starts with a file body, or a streamed argument on its way into a file, or both; both
 * directions are served in turn, so that neither side can block the other (a client that writes without reading). A mover
 * never waits for a slow peer: after MOVER_POLL_MS without progress, or at once when others queue, the connection goes
 * home and comes back when its socket is ready.
 */
#ifndef PION_MOVERS_H
#define PION_MOVERS_H

#include <poll.h>

#include "conn.h"

#define MOVER_SLICE (1024u * 1024)        /* one sendfile */
#define MOVER_TURN (8u * 1024 * 1024)     /* bytes for one connection while others wait */
#define MOVER_POLL_MS 2

typedef struct mover {
    scratch scratch;
    char *piece;          /* STREAM_PIECE bytes of a streamed argument, gathered before they are written */
    size_t held;
} mover;

static inline void *mover_new(void) { return calloc(1, sizeof(mover)); }

static inline void mover_free(void *state) {
    mover *m = (mover *)state;
    scratch_free(&m->scratch);
    free(m->piece);
    free(m);
}

static inline int conn_sink_open(const conn *c) { return c->sink && !c->body_ready; }

static inline void mover__flush(mover *m, conn *c) {
    if (!m->held) return;
    sink_feed(c->sink, m->piece, m->held, &m->scratch);
    m->held = 0;
}

/* How far the next piece goes: up to a multiple of STREAM_PIECE in the file, so that the kernel caches the file in pages as
 * large as that. Whoever maps it then has a small part of the page faults. */
static inline size_t mover__piece(const sink *s) {
    uint64_t start = s->conv == STREAM_RAW ? (uint64_t)s->offset - s->written : 0; /* a failed sink goes on taking */
    uint64_t at = start + s->got;
    return STREAM_PIECE - (size_t)(at % STREAM_PIECE);
}

/* Receive once. >0 bytes, STREAM_AGAIN, or <0 -errno (-ECONNRESET also for an orderly end in the middle of a body). */
static inline ssize_t mover__pull(mover *m, conn *c) {
    uint64_t left = c->sink->want - c->sink->got - m->held;
    size_t piece = mover__piece(c->sink), room = piece - m->held < left ? piece - m->held : (size_t)left;
    ssize_t got;
    do got = recv(c->fd, m->piece + m->held, room, MSG_DONTWAIT);
    while (got < 0 && errno == EINTR);
    if (got < 0) return errno == EAGAIN || errno == EWOULDBLOCK ? STREAM_AGAIN : -errno;
    if (got == 0) return -ECONNRESET;
    conn_count(&c->net_in, (uint64_t)got);
    m->held += (size_t)got;
    if (m->held == piece || (uint64_t)got == left) mover__flush(m, c);
    return got;
}

static inline void mover__home(conn *c) {
    plane *p = c->plane;
    pthread_mutex_lock(&p->lock);
    int first = p->returned == NULL;
    c->next_returned = p->returned;
    p->returned = c;
    pthread_mutex_unlock(&p->lock);
    if (first) ev_wake(&p->ev);
}

/* Send what can be sent: file bodies and what stands between and behind them. >0 bytes, STREAM_AGAIN, <0 error. */
static inline ssize_t mover__push(mover *m, conn *c) {
    ssize_t sent;
    outq_drop_empty(&c->out, NULL);
    if (outq_empty(&c->out)) return STREAM_AGAIN;
    if (outq_starts_with_file(&c->out)) {
        slot *x = outq_head(&c->out);
        sent = extents_send((extents *)x->owner, &x->at, c->fd, MOVER_SLICE, &m->scratch);
        if (sent > 0) c->out.sent += (uint64_t)sent;
        if (x->at.out == ((extents *)x->owner)->total) m->scratch.key = NULL;
    } else {
        sent = outq_send(&c->out, NULL, c->fd, MOVER_SLICE);
    }
    if (sent > 0) {
        c->progress_ns = ev_now_ns();
        conn_count(&c->net_out, (uint64_t)sent);
    }
    outq_drop_empty(&c->out, NULL);
    return sent;
}

/* The file of a large value. When that fails, the plane's own attempt will say why. */
static inline void mover__blob(conn *c) {
    int rc;
    do rc = ks_blob_write(c->blob_dir, c->blob_id, c->body->data, c->body->len, &c->blob_crc, c->blob_durable);
    while (rc == -EEXIST && ++c->blob_id);
    c->blob = rc ? BLOB_NO : BLOB_WRITTEN;
}

/* A large value whose SET waits for the medium: its file is written as it is received. As mover__pull; when a write fails
 * the plane receives the rest, tries once more and says why. */
static inline ssize_t mover__pull_body(conn *c) {
    const size_t len = c->body->len, piece = c->body_got - c->body_got % KS_WRITE_PIECE + KS_WRITE_PIECE;
    const size_t room = piece < len ? piece : len;
    ssize_t got;
    do got = recv(c->fd, c->body->data + c->body_got, room - c->body_got, MSG_DONTWAIT);
    while (got < 0 && errno == EINTR);
    if (got < 0) return errno == EAGAIN || errno == EWOULDBLOCK ? STREAM_AGAIN : -errno;
    if (got == 0) return -ECONNRESET;
    conn_count(&c->net_in, (uint64_t)got);
    c->body_got += (size_t)got;
    if (c->body_got < room) return got;
    if (c->blob_fd < 0) {
        while ((c->blob_fd = ks_blob_open(c->blob_dir, c->blob_id)) == -EEXIST) c->blob_id++;
        c->blob_crc = fr_seed(c->blob_id);
    }
    int rc = c->blob_fd < 0 ? c->blob_fd : 0;
    if (!rc) rc = ks_blob_put(c->blob_fd, c->body->data + c->blob_at, room - c->blob_at, c->blob_at, &c->blob_crc, 1);
    c->blob_at = room;
    if (!rc && room < len) return got;
    if (c->blob_fd >= 0) {
        rc = rc ? ks_blob_close(c->blob_dir, c->blob_id, c->blob_fd, rc)
                : ks_blob_end(c->blob_dir, c->blob_id, c->blob_fd, len, c->blob_crc, 1);
    }
    c->blob = rc ? BLOB_NO : BLOB_WRITTEN;
    return got;
}

static inline void mover_run(job *item, void *state) {
    conn *c = (conn *)item;
    plane *p = c->plane;
    mover *m = (mover *)state;
    size_t moved = 0;
    if (!m || (!m->piece && !(m->piece = (char *)malloc(STREAM_PIECE)))) {
        c->error = ENOMEM;
        mover__home(c);
        return;
    }
    m->scratch.key = NULL;
    m->held = 0;
    if (c->blob == BLOB_WANTED) mover__blob(c);
    if (c->early_n) {
        if (c->early_n < mover__piece(c->sink)) memcpy(m->piece, c->early, m->held = c->early_n);
        else sink_feed(c->sink, c->early, c->early_n, &m->scratch);
        free(c->early);
        c->early = NULL;
        c->early_n = 0;
    }
    while (!atomic_load_explicit(&c->kill, memory_order_relaxed)) {
        int sending = !outq_empty(&c->out), body = c->blob == BLOB_STREAM;
        int receiving = body || (conn_sink_open(c) && c->sink->got + m->held < c->sink->want);
        if (!receiving && !outq_starts_with_file(&c->out)) break;
        ssize_t out = sending ? mover__push(m, c) : STREAM_AGAIN;
        if (out < 0) {
            c->error = out == STREAM_SHORT ? EIO : (int)-out;
            break;
        }
        ssize_t in = !receiving ? STREAM_AGAIN : body ? mover__pull_body(c) : mover__pull(m, c);
        if (in < 0) {
            c->error = (int)-in;
            break;
        }
        moved += (size_t)out + (size_t)in;
        if (moved >= MOVER_TURN && body) break; /* the plane counts it */
        if (moved >= MOVER_TURN && jobs_contended(p->movers)) {
            if (m->held) mover__flush(m, c);
            jobs_submit(p->movers, &c->work);
            return;
        }
        if (out == STREAM_AGAIN && in == STREAM_AGAIN) {
            struct pollfd fd = {c->fd, (short)((outq_empty(&c->out) ? 0 : POLLOUT) | (receiving ? POLLIN : 0)), 0};
            if (jobs_contended(p->movers) || poll(&fd, 1, MOVER_POLL_MS) <= 0) {
                c->full = !outq_empty(&c->out);
                c->dry = (uint8_t)receiving;
                break;
            }
        }
    }
    if (m->held && !c->error) mover__flush(m, c);
    mover__home(c);
}

#endif
