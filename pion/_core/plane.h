/* The plane: one pass over all ready connections, without Python.
 *
 *   plane_turn    wait (or only look), receive, parse, run fast commands; frames for Python are queued
 *   plane_flush   write the log, then let the replies leave; connections with file bodies go to the movers
 *   plane_pop_slow, conn_*   what Plane (plane.pyx) calls, holding the GIL, to answer the queued frames
 *
 * Everything here runs in one thread, the one that calls Plane.batch; see conn.h for what a mover may touch.
 */
#ifndef PION_PLANE_H
#define PION_PLANE_H

#include <stdio.h>

#include "fast.h"
#include "movers.h"

#define PLANE_SMALL_FILE (64u * 1024)

/* ---- ends --------------------------------------------------------------------------------------------------------------- */

/* Free everything but the struct (the Python object owns that) and hand the connection to Python's reaper. */
static inline void conn_end(plane *p, conn *c) {
    if (c->where == AT_END) return;
    if (c->where == AT_MOVER) {
        atomic_store_explicit(&c->kill, 1, memory_order_relaxed);
        if (c->fd >= 0) shutdown(c->fd, SHUT_RDWR);
        return;
    }
    if (c->fd >= 0) {
        ev_set(&p->ev, c->fd, c, c->interest, 0);
        close(c->fd);
    }
    c->fd = -1;
    c->interest = 0;
    c->where = AT_END;
    conn_drop_window(c);
    resp_free(&c->parser);
    outq_clear(&c->out, &p->spares);
    outq_collect(&c->out, &p->pydead);
    free(c->out.dead.items);
    memset(&c->out.dead, 0, sizeof c->out.dead);
    conn_drop_body(c);
    sink_unref(c->sink);
    c->sink = NULL;
    free(c->early);
    c->early = NULL;
    p->net_in += c->net_in;
    p->net_out += c->net_out;
    for (int i = p->event_i; i < p->event_n; i++)
        if (p->events[i].data == c) p->events[i].data = NULL;
    conn *last = p->all.items[--p->all.n];
    p->all.items[c->index] = last;
    last->index = c->index;
    p->dead.items[p->dead.n++] = c;
}

/* A dead connection leaves the lists; its struct may then be freed. */
static inline void plane_forget(plane *p, conn *c) {
    conn_list_remove(&p->ready, c);
    conn_list_remove(&p->running, c);
    conn_list_remove(&p->touched, c);
    size_t n = p->slow_n;
    for (size_t i = 0; i < n; i++) {
        conn *x = plane_pop_slow(p);
        if (x != c) plane_push_slow(p, x);
    }
}

static inline void conn_fail(plane *p, conn *c, const char *text, size_t n) {
    char *to = outq_room(&c->out, &p->spares, n + 3);
    if (to) resp_put_line(to, '-', text, n);
    c->closing = CLOSE_FLUSH;
    conn_drop_window(c);
}

static inline void conn_fail_text(plane *p, conn *c, const char *text) { conn_fail(p, c, text, strlen(text)); }

/* conn_room did not give what was asked for. */
static inline void conn_fail_room(plane *p, conn *c, int rc) {
    conn_fail_text(p, c, rc == -ENOBUFS
        ? "ERR Protocol error: the half-received commands of all connections exceed their limit"
        : "ERR Protocol error: out of memory");
}

/* ---- from bytes to commands ----------------------------------------------------------------------------------------------- */

static inline void conn_wait(plane *p, conn *c, int what) {
    c->waiting = (uint8_t)what;
    plane_push_slow(p, c);
}

/* Which streamed command is this, at its streamed argument? */
static inline int plane__streams(plane *p, conn *c) {
    size_t n;
    if (c->parser.nargs == 0 || !c->authed) return 0;
    const char *name = conn_arg(c, 0, &n);
    for (int i = 0; i < p->nstreams; i++)
        if (p->streams[i].arg == c->parser.nargs && resp_is(name, n, p->streams[i].name, p->streams[i].len)) return 1;
    return 0;
}

/* A large value that will be logged gets a file. */
static inline void conn_blob(plane *p, conn *c, int how) {
    ks *k = p->keyspace;
    if (c->fd < 0 || c->body->len < KS_BLOB_MIN || !ks_logs(k) || k->log.blob_fd < 0) return;
    c->blob_durable = k->log.policy == KS_SYNC_ALWAYS;
    if (how == BLOB_STREAM && !c->blob_durable) return; /* nobody waits for the medium: one write at the end */
    c->blob = (uint8_t)how;
    c->blob_dir = k->log.blob_fd;
    c->blob_fd = -1;
    c->blob_at = 0;
    c->blob_id = ks_random_u64(k);
}

/* A value is complete. A large one that will be logged gets its file first, from a mover (memory connections: from ks_set). */
static inline void conn_body_done(plane *p, conn *c) {
    c->body_ready = 1;
    resp_bulk_done(&c->parser);
    conn_blob(p, c, BLOB_WANTED);
}

/* The plane counts what a mover received when the connection is home again. */
static inline void conn_count_body(plane *p, conn *c) {
    p->input_bytes += c->body_got - c->body_counted;
    c->body_counted = c->body_got;
}

/* A large argument is announced. Values of SET are received where they will stay, streamed ones are Python's to place. */
static inline void conn_bulk(plane *p, conn *c) {
    struct resp_parser *r = &c->parser;
    size_t n;
    if (!c->body && r->bulk_len >= p->limits.stream_min && plane__streams(p, c)) {
        conn_wait(p, c, WAIT_STREAM);
        return;
    }
    const char *name = r->nargs == 2 && r->left == 1 ? conn_arg(c, 0, &n) : NULL;
    fast_cmd *cmd = name && c->fast && c->authed && p->fast_enabled ? fast_find(p, name, n) : NULL;
    if (!cmd || cmd->id != FAST_SET || (cmd->flags & FLAG_DENYOOM && ks_full(p->keyspace)) ||
        !(c->body = kval_new(p->keyspace->pool, r->bulk_len))) {
        resp_bulk_keep(r);
        return;
    }
    size_t here = resp_bulk_here(r, c->end - c->start);
    memcpy(c->body->data, c->in + c->start + r->pos, here);
    c->end -= resp_bulk_take(r, c->in + c->start, c->end - c->start);
    c->body_got = c->body_counted = here;
    p->input_bytes += here;
    if (here == r->bulk_len) conn_body_done(p, c);
    else conn_blob(p, c, BLOB_STREAM);
}

/* Python's answer to WAIT_STREAM, or to WAIT_PLACE: a sink (whose reference is taken over), or NULL to receive the bulk in memory. */
static inline int conn_stream(plane *p, conn *c, sink *s) {
    struct resp_parser *r = &c->parser;
    c->waiting = WAIT_NO;
    if (!s) {
        resp_bulk_keep(r);
        return 0;
    }
    size_t here = resp_bulk_here(r, c->end - c->start);
    if (here) {
        c->early = (char *)malloc(here);
        if (!c->early) return -ENOMEM;
        memcpy(c->early, c->in + c->start + r->pos, here);
        c->early_n = here;
    }
    c->end -= resp_bulk_take(r, c->in + c->start, c->end - c->start);
    c->sink = s;
    (void)p;
    return 0;
}

/* A complete frame. True when it was answered here, false when it waits for Python. */
static inline int conn_frame(plane *p, conn *c) {
    size_t n;
    fast_cmd *cmd = NULL;
    if (c->fast && c->authed && p->fast_enabled && !c->sink) {
        const char *name = conn_arg(c, 0, &n);
        cmd = fast_find(p, name, n);
    }
    if (!cmd || !fast_arity_ok(cmd, c->parser.nargs)) return 0;
    if (cmd->flags & FLAG_WRITE && ks_refuses(p->keyspace)) return 0;
    fast_call call = {p, c, &c->out, NULL, c->parser.nargs};
    size_t logged = ks_log_pending(p->keyspace);
    const uint64_t queued = c->out.queued;
    if (cmd->flags & FLAG_DENYOOM && !ks_make_room(p->keyspace)) return 0;
    if (fast_exec(&call, cmd->id) != FAST_DONE) return 0;
    if (ks_log_pending(p->keyspace) != logged) conn_wrote(c, queued);
    c->replies++;
    c->blob = BLOB_NO; /* the keyspace has the file now */
    cmd->calls++;
    p->commands++;
    c->commands++;
    c->last_cmd = cmd->lower;
    conn_consume(c);
    return 1;
}

/* Parse and run what the window holds. Stops at a frame for Python, a body that goes elsewhere, a reply that comes later,
 * full output, or the end of the bytes. */
static inline void conn_run(plane *p, conn *c) {
    char text[RESP_ERROR_MAX + 8];
    plane_touch(p, c);
    c->active_ns = p->now_ns;
    if (!c->in) return;
    while (!c->closing && !c->pending && !c->waiting && c->blob != BLOB_WANTED &&
           (c->body_ready || (!c->body && !c->sink))) {
        if (conn_output_full(c)) {
            c->stalled = 1;
            return;
        }
        switch (resp_parse(&c->parser, c->in + c->start, c->end - c->start)) {
        case RESP_FRAME:
            if (c->parser.nargs == 0) conn_consume(c);
            else if (!conn_frame(p, c)) conn_wait(p, c, WAIT_FRAME);
            break;
        case RESP_BULK: conn_bulk(p, c); break;
        case RESP_MORE: return;
        default:
            memcpy(text, "ERR ", 4);
            conn_fail(p, c, text, 4 + resp_error_text(&c->parser, text + 4));
            return;
        }
    }
}

/* ---- receiving -------------------------------------------------------------------------------------------------------------- */

/* The body of a SET has grown. */
static inline void conn_body_got(plane *p, conn *c, size_t n) {
    c->body_got += n;
    conn_count_body(p, c);
    if (c->body_got == c->body->len) conn_body_done(p, c);
}

static inline ssize_t conn__recv(conn *c, char *to, size_t n) {
    ssize_t got;
    do got = recv(c->fd, to, n, MSG_DONTWAIT);
    while (got < 0 && errno == EINTR);
    if (got > 0) conn_count(&c->net_in, (uint64_t)got);
    return got;
}

/* Receive once: into a body, the connection's own window, or the shared buffer; then run. Returns the bytes received,
 * 0 when there was nothing (or nothing is wanted) or -1 when the connection ended. `full`: there may be more. */
static inline ssize_t conn_receive(plane *p, conn *c, int *full) {
    size_t room;
    char *to;
    *full = 0;
    if (c->closing == CLOSE_LINGER) {
        to = p->shared;
        room = CONN_SHARED;
    } else if (c->body && !c->body_ready) {
        to = c->body->data + c->body_got;
        room = c->body->len - c->body_got;
        if (room > p->limits.slice) room = p->limits.slice;
        if (p->input_bytes + room > p->limits.input_total) {
            conn_fail_room(p, c, -ENOBUFS);
            return 0;
        }
    } else if (!c->in) {
        c->in = to = p->shared;
        c->borrowed = 1;
        c->cap = room = CONN_SHARED;
        c->start = c->end = 0;
    } else {
        int rc = conn_room(c, 1);
        if (rc) {
            conn_fail_room(p, c, rc);
            return 0;
        }
        to = c->in + c->end;
        room = c->cap - c->end;
        if (room > p->limits.slice) room = p->limits.slice;
    }
    ssize_t got = conn__recv(c, to, room);
    if (got <= 0) {
        if (c->borrowed) conn_drop_window(c);
        if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return 0;
        if (got < 0 || c->closing == CLOSE_LINGER || (c->body && !c->body_ready)) {
            conn_end(p, c);
            return -1;
        }
        c->eof = 1;
        plane_touch(p, c);
        return 0;
    }
    *full = (size_t)got == room;
    if (c->closing == CLOSE_LINGER) {
        c->lingered += (size_t)got;
        if (c->lingered > CONN_LINGER_BYTES) {
            conn_end(p, c);
            return -1;
        }
        return got;
    }
    if (c->body && !c->body_ready) {
        conn_body_got(p, c, (size_t)got);
        *full = 1;
    } else {
        c->end += (size_t)got;
    }
    if (!c->body || c->body_ready) conn_run(p, c);
    if (c->body && !c->body_ready) *full = 1; /* its bytes follow at once */
    if (conn_keep_window(c)) {
        conn_end(p, c);
        return -1;
    }
    return got;
}

/* Its next bytes are a mover's to receive. */
static inline int conn_streams(const conn *c) { return conn_sink_open(c) || c->blob == BLOB_STREAM; }

static inline int conn_wants_input(const conn *c) {
    if (c->closing == CLOSE_LINGER) return 1;
    return !c->closing && !c->eof && !c->pending && !c->waiting && !c->stalled && !conn_streams(c) &&
           c->blob != BLOB_WANTED;
}

static inline void conn_read(plane *p, conn *c) {
    size_t moved = 0;
    int full = 1;
    while (full && moved < p->limits.slice && c->where == AT_HOME && conn_wants_input(c)) {
        ssize_t got = conn_receive(p, c, &full);
        if (got <= 0) break;
        moved += (size_t)got;
    }
    if (c->where == AT_HOME) plane_touch(p, c);
}

/* ---- sending ---------------------------------------------------------------------------------------------------------------- */

/* Never while it waits for Python, when that answers within the batch. */
static inline int conn_needs_mover(const conn *c) {
    return c->fd >= 0 && (!c->waiting || c->waiting == WAIT_PLACE) && ((conn_streams(c) && !c->dry) || (outq_starts_with_file(&c->out) && !c->full) ||
                          c->blob == BLOB_WANTED);
}

static inline void conn_lend(plane *p, conn *c) {
    ev_set(&p->ev, c->fd, c, c->interest, 0);
    c->interest = 0;
    c->where = AT_MOVER;
    c->error = 0;
    c->full = c->dry = 0;
    c->work.run = mover_run;
    p->lent++;
    jobs_submit(p->movers, &c->work);
}

/* Queue a file body. A small one whose pages are in memory becomes memory here; the rest is the movers' business.
 * 0 or -ENOMEM. */
static inline int conn_put_extents(plane *p, conn *c, extents *e) {
    if (e->total <= PLANE_SMALL_FILE) {
        extents_at at;
        memset(&at, 0, sizeof at);
        p->scratch.key = NULL;
        char *to = outq_room(&c->out, &p->spares, (size_t)e->total);
        if (!to) return -ENOMEM;
        while (at.out < e->total) {
            const char *from = NULL;
            ssize_t got = extents_window(e, &at, &p->scratch, (size_t)(e->total - at.out), 1, &from);
            if (got <= 0) break;
            memcpy(to + at.out, from, (size_t)got);
            at.out += (uint64_t)got;
        }
        p->scratch.key = NULL;
        if (at.out == e->total) return 0;
        outq_trim(&c->out, (size_t)e->total);
    }
    return outq_put_extents(&c->out, e) ? 0 : -ENOMEM;
}

static inline void conn_want(plane *p, conn *c) {
    int want = 0;
    if (conn_wants_input(c) || conn_streams(c)) want |= EV_IN;
    else if (c->waiting && c->waiting != WAIT_PLACE) want |= c->interest & EV_IN; /* answered within this batch: do not toggle */
    if (!outq_empty(&c->out)) want |= EV_OUT;
    if (!(want & EV_IN) && (c->pending || c->waiting == WAIT_PLACE) && !c->hup) want |= EV_HUP;
    if (want == c->interest) return;
    if (ev_set(&p->ev, c->fd, c, c->interest, want) < 0) {
        conn_end(p, c);
        return;
    }
    c->interest = (uint8_t)want;
}

/* FIN first, then read until the peer has closed too: closing with unread input would make the kernel send RST, and that
 * may overtake the last reply. */
static inline void conn_linger(plane *p, conn *c) {
    if (c->eof || c->fd < 0 || shutdown(c->fd, SHUT_WR) < 0) {
        conn_end(p, c);
        return;
    }
    c->closing = CLOSE_LINGER;
    c->linger_ns = p->now_ns + p->limits.linger_ns;
    c->waiting = WAIT_NO; /* a frame that waits for Python goes with the window it lies in */
    conn_drop_window(c);
}

/* Send what may leave, decide who serves the connection next and what it waits for. */
static inline void conn_settle(plane *p, conn *c) {
    if (c->where != AT_HOME) return;
    if (c->out.failed) {
        conn_end(p, c);
        return;
    }
    outq_drop_empty(&c->out, &p->spares);
    if (c->fd >= 0 && c->closing != CLOSE_LINGER) {
        size_t moved = 0;
        while (!outq_empty(&c->out) && !outq_starts_with_file(&c->out) && moved < p->limits.slice) {
            ssize_t sent = outq_send(&c->out, &p->spares, c->fd, p->limits.slice - moved);
            if (sent < 0) {
                conn_end(p, c);
                return;
            }
            if (sent == STREAM_AGAIN) break;
            c->progress_ns = p->now_ns;
            conn_count(&c->net_out, (uint64_t)sent);
            moved += (size_t)sent;
            outq_drop_empty(&c->out, &p->spares);
        }
        if (!c->authed && c->out.ram > p->limits.preauth_output) {
            p->overflowed++;
            conn_end(p, c);
            return;
        }
    }
    outq_collect(&c->out, &p->pydead);
    if (outq_empty(&c->out)) c->progress_ns = p->now_ns;
    if (c->stalled && !conn_output_full(c)) {
        c->stalled = 0;
        plane_push_ready(p, c);
    }
    if (conn_needs_mover(c)) {
        conn_lend(p, c);
        return;
    }
    if (c->fd < 0) return;
    if (outq_empty(&c->out)) {
        if (c->closing == CLOSE_FLUSH) conn_linger(p, c);
        else if (c->eof && !c->pending && !c->waiting && !c->in_ready) conn_end(p, c);
    }
    if (c->where == AT_HOME) conn_want(p, c);
}

/* The log could not be written: an error instead of every reply from that to the first write of the batch on. An
 * acknowledgement would be a lie, and so might be what was read behind it. */
static inline void conn_take_back(plane *p, conn *c, int rc) {
    char text[256];
    int len = snprintf(text, sizeof text, "-MISCONF Errors writing to the log: %s\r\n", strerror(-rc));
    outq_rollback(&c->out, &p->spares, c->mark);
    for (size_t i = 0; i < c->replies; i++) outq_put(&c->out, &p->spares, text, (size_t)len);
}

/* The log first, then the replies. */
static inline void plane_flush(plane *p) {
    int rc = ks_log_pending(p->keyspace) ? ks_log_flush(p->keyspace) : 0;
    size_t busy = 0, n = p->touched.n;
    p->touched.n = 0;
    for (size_t i = 0; i < n; i++) {
        conn *c = p->touched.items[i];
        c->touched = 0;
        if (rc && c->wrote && c->where == AT_HOME) conn_take_back(p, c, rc);
        if (c->where == AT_HOME && c->out.ram > CONN_SHARED) p->touched.items[busy++] = c;
        else conn_settle(p, c);
    }
    /* Large replies last, a slice each, beginning with another one each time; who does not get a turn within the batch
     * waits for its socket again. */
    uint64_t end = p->now_ns + p->limits.batch_ns;
    size_t first = busy ? p->turn_first++ % busy : 0;
    for (size_t i = 0; i < busy; i++) {
        conn *c = p->touched.items[(first + i) % busy];
        if (i && ev_now_ns() > end) conn_want(p, c);
        else conn_settle(p, c);
    }
}

/* ---- the turn ---------------------------------------------------------------------------------------------------------------- */

static inline void plane_clock(plane *p) {
    p->now_ns = ev_now_ns();
    p->now_ms = ks_tick(p->keyspace);
}

static inline void plane_take_home(plane *p) {
    pthread_mutex_lock(&p->lock);
    conn *c = p->returned;
    p->returned = NULL;
    pthread_mutex_unlock(&p->lock);
    while (c) {
        conn *next = c->next_returned;
        c->where = AT_HOME;
        p->lent--;
        c->active_ns = p->now_ns;
        if (c->error || atomic_load_explicit(&c->kill, memory_order_relaxed)) {
            conn_end(p, c);
        } else {
            if (conn_sink_open(c) && sink_done(c->sink)) {
                c->body_ready = 1;
                resp_bulk_done(&c->parser);
            }
            if (c->body && !c->body_ready) {
                conn_count_body(p, c);
                if (c->body_got == c->body->len) { /* without a file when that failed */
                    c->body_ready = 1;
                    resp_bulk_done(&c->parser);
                } else if (p->input_bytes > p->limits.input_total) {
                    conn_drop_body(c);
                    conn_fail_room(p, c, -ENOBUFS);
                }
            }
            if (c->blob == BLOB_WRITTEN) {
                if (klog_fresh_blob(&p->keyspace->log, c->blob_id)) conn_end(p, c);
                else ks_blob_attach(c->body, c->blob_id, c->blob_crc);
            }
            if (c->where == AT_HOME && !conn_streams(c)) conn_run(p, c);
            if (c->where == AT_HOME && conn_keep_window(c)) conn_end(p, c);
            if (c->where == AT_HOME) plane_touch(p, c);
        }
        c = next;
    }
}

static inline void conn_event(plane *p, conn *c, int what) {
    if (c->where != AT_HOME) return;
    if (what & EV_OUT) c->full = 0;
    if (what & EV_IN && conn_streams(c)) {
        c->dry = 0; /* bytes for a mover, or the end of the connection: it will find out */
    } else if (what & EV_IN && conn_wants_input(c)) {
        conn_read(p, c);
    } else if (what & EV_ERR) {
        conn_end(p, c);
        return;
    }
    /* EV_IN that was not asked for: kqueue's low-water mark is never above what the socket's buffer takes */
    if (what & (EV_HUP | EV_IN) && c->where == AT_HOME && !(c->interest & EV_IN)) c->hup = 1;
    if (c->where == AT_HOME) plane_touch(p, c);
}

/* One turn. Returns the number of connections served, or -errno. */
static inline int plane_turn(plane *p, int64_t timeout_ns) {
    int served = 0;
    if (p->event_i >= p->event_n) {
        p->event_i = p->event_n = 0;
        int n = ev_wait(&p->ev, p->events, EV_BATCH, p->ready.n || p->slow_n ? 0 : timeout_ns);
        if (n < 0) return n;
        p->event_n = n;
    }
    plane_clock(p);
    uint64_t end = p->now_ns + p->limits.batch_ns;
    conn_list run = p->running;
    p->running = p->ready;
    p->ready = run;
    p->ready.n = 0;
    for (size_t i = 0; i < p->running.n; i++) {
        conn *c = p->running.items[i];
        c->in_ready = 0;
        if (c->where != AT_HOME) continue;
        conn_run(p, c);
        if (conn_keep_window(c)) conn_end(p, c);
        served++;
    }
    p->running.n = 0;
    while (p->event_i < p->event_n) {
        ev_event *x = &p->events[p->event_i++];
        if (!x->data) continue;
        served++;
        if (x->data == &p->ev) {
            ev_woken(&p->ev);
            plane_take_home(p);
            continue;
        }
        uint64_t before = ((conn *)x->data)->net_in;
        conn_event(p, (conn *)x->data, x->what);
        if (x->data && ((conn *)x->data)->net_in - before >= CONN_SHARED && ev_now_ns() > end) break;
    }
    plane_flush(p);
    return served;
}

/* Something is left to do without waiting for an event. */
static inline int plane_busy(const plane *p) { return p->ready.n || p->slow_n || p->event_i < p->event_n; }

/* Ten times a second: peers that do not take their replies, or that do not close; the bound over all replies. */
static inline void plane_tick(plane *p) {
    size_t output = 0;
    plane_clock(p);
    for (size_t i = p->all.n; i-- > 0;) {
        conn *c = p->all.items[i];
        if (c->where != AT_HOME || c->fd < 0) continue;
        output += c->out.ram;
        if (c->closing == CLOSE_LINGER) {
            if (p->now_ns > c->linger_ns) conn_end(p, c);
        } else if (!outq_empty(&c->out) && p->now_ns - c->progress_ns > p->limits.send_timeout_ns) {
            p->timed_out++;
            conn_end(p, c);
        }
    }
    p->tight = output > p->limits.output_total;
}

/* ---- birth and death ------------------------------------------------------------------------------------------------------- */

static inline conn *conn_new(plane *p, int fd) {
    if (plane_reserve(p)) return NULL;
    conn *c = (conn *)calloc(1, sizeof *c);
    if (!c) return NULL;
    plane_clock(p);
    c->plane = p;
    c->fd = fd;
    c->id = ++p->next_id;
    c->fast = 1;
    c->proto = 2;
    c->created_ns = c->active_ns = p->now_ns;
    c->progress_ns = p->now_ns;
    resp_init(&c->parser, &RESP_LIMITS_UNAUTH);
    c->index = p->all.n;
    p->all.items[p->all.n++] = c;
    p->total_connections++;
    return c;
}

static inline plane *plane_new(ks *keyspace, const plane_limits *limits, int movers) {
    plane *p = (plane *)calloc(1, sizeof *p);
    if (!p) return NULL;
    p->limits = *limits;
    p->keyspace = keyspace;
    p->fast_enabled = 1;
    pthread_mutex_init(&p->lock, NULL);
    p->shared = (char *)malloc(CONN_SHARED);
    p->movers = jobs_new(movers, mover_new, mover_free);
    if (!p->shared || !p->movers || ev_open(&p->ev)) {
        if (p->movers) jobs_free(p->movers);
        free(p->shared);
        free(p);
        return NULL;
    }
    plane_clock(p);
    return p;
}

/* End every connection, waiting for those that movers have. */
static inline void plane_end_all(plane *p) {
    while (p->all.n) {
        for (size_t i = p->all.n; i-- > 0;) conn_end(p, p->all.items[i]);
        jobs_wait_idle(p->movers, -1);
        plane_take_home(p);
    }
}

/* After plane_end_all. */
static inline void plane_free(plane *p) {
    jobs_free(p->movers);
    ev_close(&p->ev);
    while (p->spares.free) {
        chunk *next = p->spares.free->next;
        free(p->spares.free);
        p->spares.free = next;
    }
    pthread_mutex_destroy(&p->lock);
    free(p->all.items);
    free(p->ready.items);
    free(p->running.items);
    free(p->touched.items);
    free(p->dead.items);
    free(p->slow);
    free(p->pydead.items);
    free(p->shared);
    scratch_free(&p->scratch);
    free(p);
}

#endif
