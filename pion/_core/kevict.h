/* --maxmemory of the keyspace: what goes, so that used_bytes stays within it.
 *
 * Least recent use is sampled, as Redis does it: a list in order of use would cost two pointers a key and two cache misses
 * with every read. Each eviction looks at KS_SAMPLES random keys and remembers the ones used longest ago in a pool, so the
 * choice gets better with every look. The pool holds hashes, not pointers: a key that was used or deleted since is found
 * out when its turn comes. volatile-ttl needs no sampling: the expiry heap knows which key goes soonest.
 *
 * An eviction is a DEL in the log, written before the reply of the command that asked for it: it does not come back.
 */
#ifndef PION_KEVICT_H
#define PION_KEVICT_H

#include "keyspace.h"

#define KS_SAMPLES 8

enum { KS_NOEVICTION = 0, KS_ALLKEYS_LRU, KS_VOLATILE_LRU, KS_VOLATILE_TTL };

static inline void ks_offer(ks *k, const kent *e) {
    const uint32_t now = ks_clock(k->now_ms);
    uint32_t least = UINT32_MAX;
    size_t at = 0;
    for (size_t i = 0; i < k->ncandidates; i++) {
        kcandidate *c = &k->candidates[i];
        if (c->hash == e->hash && c->db == e->db) {
            c->clock = e->clock;
            return;
        }
        if (now - c->clock < least) {
            least = now - c->clock;
            at = i;
        }
    }
    if (k->ncandidates < KS_CANDIDATES) at = k->ncandidates++;
    else if (now - e->clock <= least) return;
    k->candidates[at] = (kcandidate){e->hash, e->clock, e->db};
}

/* Look at some random keys, those with a time to live only if `due`. */
static inline void ks_sample(ks *k, int due) {
    if (due) {
        for (int i = 0; i < KS_SAMPLES && k->nheap; i++) ks_offer(k, k->heap[ks_random_u64(k) % k->nheap].entry);
        return;
    }
    uint64_t count = 0;
    int db = 0;
    for (int i = 0; i < k->databases; i++) count += k->db[i].count;
    if (!count) return;
    uint64_t pick = ks_random_u64(k) % count;
    for (; pick >= k->db[db].count; db++) pick -= k->db[db].count;
    uint64_t cursor = ks_random_u64(k);
    int wraps = 0, seen = 0;
    while (seen < KS_SAMPLES && wraps < 2) { /* a walk from a random place, once around at most */
        for (const kent *e = ks_scan(k, db, &cursor); e; e = e->next, seen++) ks_offer(k, e);
        if (!cursor) wraps++;
    }
}

/* The candidate that was used longest ago and not since; NULL when the pool has none. */
static inline kent *ks_candidate(ks *k, int due) {
    while (k->ncandidates) {
        const uint32_t now = ks_clock(k->now_ms);
        size_t best = 0;
        for (size_t i = 1; i < k->ncandidates; i++)
            if (now - k->candidates[i].clock > now - k->candidates[best].clock) best = i;
        const kcandidate c = k->candidates[best];
        k->candidates[best] = k->candidates[--k->ncandidates];
        const kdb *d = &k->db[c.db];
        for (kent *e = d->now.buckets ? *kdb_bucket(d, c.hash) : NULL; e; e = e->next)
            if (e->hash == c.hash && e->clock == c.clock && (!due || e->expire)) return e;
    }
    return NULL;
}

/* Delete one key by the policy. 0: there is none that may go. */
static inline int ks_evict(ks *k) {
    kent *e = NULL;
    if (k->policy == KS_VOLATILE_TTL) {
        if (k->nheap) e = k->heap[0].entry;
    } else if (k->policy != KS_NOEVICTION) {
        const int due = k->policy == KS_VOLATILE_LRU;
        ks_sample(k, due);
        if (!(e = ks_candidate(k, due))) {
            ks_sample(k, due); /* all candidates were of yesterday */
            e = ks_candidate(k, due);
        }
    }
    if (!e) return 0;
    ks_delete(k, e);
    k->evicted++;
    return 1;
}

static inline int ks_over(const ks *k) { return k->maxmemory && k->used_bytes > k->maxmemory; }

/* Before a command that may grow the keyspace: evict until it is within its bound. Whoever asks before each write passes
 * the bound by one value at most. 0: it is not, and nothing may go; the command is to be refused. */
static inline int ks_make_room(ks *k) {
    if (__builtin_expect(!ks_over(k), 1)) return 1;
    if (ks_logs(k) && ks_refuses(k)) return 0; /* an eviction that is not written down would be taken back by a restart */
    while (ks_over(k) && k->nheap && k->heap[0].when <= k->now_ms && ks_reap(k, k->heap[0].entry)) continue;
    while (ks_over(k))
        if (!ks_evict(k)) return 0;
    return 1;
}

/* Writers will be refused: no use in receiving what they send where it would stay. */
static inline int ks_full(const ks *k) { return ks_over(k) && k->policy == KS_NOEVICTION; }

#endif
