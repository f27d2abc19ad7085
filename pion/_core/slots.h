/* The ordered output of one connection: a queue of slots that leave in order, whatever they are made of.
 *
 *   SLOT_MEM   reply bytes in a chunk of our own; small replies share the chunk at the end of the queue
 *   SLOT_VAL   a value of the keyspace, pinned and sent from where it lies
 *   SLOT_PY    a bytes object of a handler, sent from where it lies; given back to the plane (which holds the GIL)
 *   SLOT_EXT   pieces of files; only movers send those
 *
 * The queue has the same owner as its connection: the plane, or a mover while the connection is lent.
 */
#ifndef PION_SLOTS_H
#define PION_SLOTS_H

#include <limits.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include "keyspace.h"
#include "resp.h"
#include "stream.h"

#define SLOT_CHUNK (16u * 1024)
#define SLOT_PIN (16u * 1024) /* values from here on are pinned, smaller ones copied into the chunk */
#define SLOT_IOV 64
#define SLOT_SPARE 64         /* chunks kept by the plane for the next reply */

enum { SLOT_MEM = 1, SLOT_VAL, SLOT_PY, SLOT_EXT };

typedef struct chunk {
    struct chunk *next;
    size_t cap;
    char data[];
} chunk;

typedef struct slot {
    uint8_t kind;
    size_t n;              /* bytes left (SLOT_EXT: see at) */
    const char *p;         /* next byte */
    void *owner;           /* chunk, kval, PyObject or extents */
    extents_at at;
} slot;

/* Objects whose last reference must be dropped under the GIL. */
typedef struct pyheap {
    void **items;
    size_t n, cap;
} pyheap;

typedef struct spares {
    chunk *free;
    int n;
} spares;

typedef struct outq {
    slot *ring;            /* cap slots, a power of two; head and tail count for ever */
    uint32_t head, tail, cap;
    size_t ram;            /* bytes of memory the queue holds */
    uint64_t queued;       /* bytes ever queued: a mark to roll back to */
    uint64_t sent;
    int failed;            /* no memory for a reply: the connection cannot go on */
    pyheap dead;           /* sent SLOT_PY objects; room for every one in the queue */
    size_t pinned;         /* SLOT_PY objects queued or dead */
} outq;

static inline int outq_empty(const outq *q) { return q->head == q->tail; }
static inline uint32_t outq_len(const outq *q) { return q->tail - q->head; }
static inline slot *outq_at(const outq *q, uint32_t i) { return &q->ring[i & (q->cap - 1)]; }
static inline slot *outq_head(const outq *q) { return outq_at(q, q->head); }

static inline chunk *chunk_new(spares *s, size_t cap) {
    if (cap == SLOT_CHUNK && s && s->free) {
        chunk *c = s->free;
        s->free = c->next;
        s->n--;
        return c;
    }
    chunk *c = (chunk *)malloc(sizeof *c + cap);
    if (c) c->cap = cap;
    return c;
}

static inline void chunk_free(spares *s, chunk *c) {
    if (s && c->cap == SLOT_CHUNK && s->n < SLOT_SPARE) {
        c->next = s->free;
        s->free = c;
        s->n++;
    } else {
        free(c);
    }
}

static inline int pyheap_reserve(pyheap *h, size_t room) {
    if (h->cap >= room) return 0;
    size_t cap = h->cap ? h->cap * 2 : 16;
    while (cap < room) cap *= 2;
    void **items = (void **)realloc(h->items, cap * sizeof *items);
    if (!items) return -ENOMEM;
    h->items = items;
    h->cap = cap;
    return 0;
}

static inline slot *outq__push(outq *q) {
    if (q->tail - q->head == q->cap) {
        uint32_t cap = q->cap ? q->cap * 2 : 4, n = q->tail - q->head;
        slot *ring = (slot *)malloc(cap * sizeof *ring);
        if (!ring) {
            q->failed = 1;
            return NULL;
        }
        for (uint32_t i = 0; i < n; i++) ring[i] = *outq_at(q, q->head + i);
        free(q->ring);
        q->ring = ring;
        q->cap = cap;
        q->head = 0;
        q->tail = n;
    }
    return outq_at(q, q->tail++);
}

/* Room for n more bytes in one piece, counted as queued already: write to the answer, all of it. NULL: no memory. */
static inline char *outq_room(outq *q, spares *s, size_t n) {
    if (!outq_empty(q)) {
        slot *last = outq_at(q, q->tail - 1);
        if (last->kind == SLOT_MEM) {
            chunk *c = (chunk *)last->owner;
            char *end = (char *)last->p + last->n;
            if ((size_t)(c->data + c->cap - end) >= n) {
                last->n += n;
                q->ram += n;
                q->queued += n;
                return end;
            }
        }
    }
    chunk *c = chunk_new(s, n > SLOT_CHUNK ? n : SLOT_CHUNK);
    slot *last = c ? outq__push(q) : NULL;
    if (!last) {
        if (c) free(c);
        q->failed = 1;
        return NULL;
    }
    last->kind = SLOT_MEM;
    last->n = n;
    last->p = c->data;
    last->owner = c;
    q->ram += n;
    q->queued += n;
    return c->data;
}

/* Give back the last n bytes of what outq_room just answered. */
static inline void outq_trim(outq *q, size_t n) {
    outq_at(q, q->tail - 1)->n -= n;
    q->ram -= n;
    q->queued -= n;
}

static inline void outq_put(outq *q, spares *s, const void *p, size_t n) {
    char *to = n ? outq_room(q, s, n) : NULL;
    if (to) memcpy(to, p, n);
}

static inline int outq__pin(outq *q, int kind, void *owner, const char *p, size_t n) {
    slot *last = outq__push(q);
    if (!last) return 0;
    last->kind = (uint8_t)kind;
    last->n = n;
    last->p = p;
    last->owner = owner;
    q->ram += n;
    q->queued += n;
    return 1;
}

/* Send n bytes of a Python object from where they lie. Takes over the caller's reference when it answers 1; `all` is where
 * the objects of all queues come back (see outq_collect). Called under the GIL: room is made now, so that nothing can
 * fail later. */
static inline int outq_put_object(outq *q, pyheap *all, size_t all_pinned, void *object, const char *p, size_t n) {
    if (pyheap_reserve(&q->dead, q->pinned + 1) || pyheap_reserve(all, all_pinned + 1)) return 0;
    if (!outq__pin(q, SLOT_PY, object, p, n)) return 0;
    q->pinned++;
    return 1;
}

/* Move sent objects to the list that the holder of the GIL empties. */
static inline void outq_collect(outq *q, pyheap *all) {
    while (q->dead.n) {
        all->items[all->n++] = q->dead.items[--q->dead.n];
        q->pinned--;
    }
}

static inline void outq_put_value(outq *q, spares *s, kval *v) {
    char head[RESP_NUM_MAX];
    outq_put(q, s, head, resp_put_num(head, '$', (int64_t)v->len));
    if (v->len < SLOT_PIN) {
        outq_put(q, s, v->data, v->len);
    } else {
        kval_ref(v);
        if (!outq__pin(q, SLOT_VAL, v, v->data, v->len)) kval_unref(v);
    }
    outq_put(q, s, "\r\n", 2);
}

static inline int outq_put_extents(outq *q, extents *e) {
    slot *last = outq__push(q);
    if (!last) return 0;
    last->kind = SLOT_EXT;
    last->n = 0;
    last->p = NULL;
    last->owner = extents_ref(e);
    memset(&last->at, 0, sizeof last->at);
    q->queued += e->total;
    return 1;
}

static inline void outq__release(outq *q, spares *s, slot *x) {
    switch (x->kind) {
    case SLOT_MEM: chunk_free(s, (chunk *)x->owner); break;
    case SLOT_VAL: kval_unref((kval *)x->owner); break;
    case SLOT_PY: q->dead.items[q->dead.n++] = x->owner; break;
    case SLOT_EXT: extents_unref((extents *)x->owner); break;
    }
    x->owner = NULL;
}

/* The first n bytes of memory slots have been sent. */
static inline void outq__sent(outq *q, spares *s, size_t n) {
    q->ram -= n;
    q->sent += n;
    while (n) {
        slot *x = outq_head(q);
        if (n < x->n) {
            x->p += n;
            x->n -= n;
            return;
        }
        n -= x->n;
        outq__release(q, s, x);
        q->head++;
    }
}

static inline void outq_drop_empty(outq *q, spares *s) {
    while (!outq_empty(q)) {
        slot *x = outq_head(q);
        if (x->kind == SLOT_EXT ? x->at.out < ((extents *)x->owner)->total : x->n != 0) return;
        outq__release(q, s, x);
        q->head++;
    }
}

static inline void outq_pop(outq *q, spares *s) {
    slot *x = outq_head(q);
    if (x->kind != SLOT_EXT) q->ram -= x->n;
    outq__release(q, s, x);
    q->head++;
}

/* Forget everything queued after `mark` (an earlier q->queued); nothing of it may have been sent. */
static inline void outq_rollback(outq *q, spares *s, uint64_t mark) {
    while (q->queued > mark && !outq_empty(q)) {
        slot *x = outq_at(q, q->tail - 1);
        uint64_t extra = q->queued - mark;
        uint64_t held = x->kind == SLOT_EXT ? ((extents *)x->owner)->total - x->at.out : x->n;
        if (x->kind == SLOT_MEM && held > extra) {
            x->n -= (size_t)extra;
            q->ram -= (size_t)extra;
            q->queued = mark;
            return;
        }
        if (x->kind != SLOT_EXT) q->ram -= x->n;
        q->queued -= held;
        outq__release(q, s, x);
        q->tail--;
    }
}

static inline void outq_clear(outq *q, spares *s) {
    while (!outq_empty(q)) {
        outq__release(q, s, outq_head(q));
        q->head++;
    }
    free(q->ring);
    q->ring = NULL;
    q->cap = q->head = q->tail = 0;
    q->ram = 0;
}

static inline int outq_starts_with_file(const outq *q) { return !outq_empty(q) && outq_head(q)->kind == SLOT_EXT; }

/* Send up to max bytes of memory slots to a non-blocking socket; stops before a SLOT_EXT.
 * >0 bytes sent, STREAM_AGAIN when the socket is full (or nothing is to be sent), <0 -errno. */
static inline ssize_t outq_send(outq *q, spares *s, int fd, size_t max) {
    struct iovec iov[SLOT_IOV];
    struct msghdr msg;
    size_t total = 0;
    int n = 0, more = 0;
    for (uint32_t i = q->head; i != q->tail && total < max; i++) {
        slot *x = outq_at(q, i);
        if (x->kind == SLOT_EXT || n == SLOT_IOV) {
            more = 1;
            break;
        }
        size_t take = x->n < max - total ? x->n : max - total;
        iov[n].iov_base = (void *)x->p;
        iov[n++].iov_len = take;
        total += take;
    }
    if (!total) return STREAM_AGAIN;
    int flags = MSG_DONTWAIT | STREAM_NOSIGNAL;
#if defined(MSG_MORE)
    if (more) flags |= MSG_MORE; /* the header of a body goes out with its first bytes */
#endif
    (void)more;
    ssize_t sent;
    do {
        if (n == 1) {
            sent = send(fd, iov[0].iov_base, iov[0].iov_len, flags);
        } else {
            memset(&msg, 0, sizeof msg);
            msg.msg_iov = iov;
            msg.msg_iovlen = n;
            sent = sendmsg(fd, &msg, flags);
        }
    } while (sent < 0 && errno == EINTR);
    if (sent < 0) return errno == EAGAIN || errno == EWOULDBLOCK ? STREAM_AGAIN : -errno;
    outq__sent(q, s, (size_t)sent);
    return sent;
}

#endif
