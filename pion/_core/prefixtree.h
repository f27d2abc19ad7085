/* A tree of prefixes by their chained block hashes: which stored prefix shares most of the blocks that are asked for?
 *
 * A node is a block behind the blocks of its ancestors, so prefixes that begin alike share nodes: what is held is one
 * node of 32 bytes and 8 to 16 bytes of hash table for each different block. Nodes are found by (parent, hash), not by
 * the hash alone: hashes come from clients, and two of them may be equal without the blocks before them being so.
 * Prefixes are numbers that the caller gives; they hang in lists at the node of their last block.
 *
 * The readable twin is pion/ref/prefixtree.py. Radix trees over blocks of tokens: Zheng et al., "SGLang: Efficient
 * Execution of Structured Language Model Programs", 2024.
 */
#ifndef PION_PREFIXTREE_H
#define PION_PREFIXTREE_H

#include <errno.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define PT_NONE 0u           /* node 0 is the root: nobody's child, nobody's sibling */
#define PT_LAST UINT32_MAX   /* end of a list of prefixes */

typedef struct pt_node {
    uint64_t hash;
    uint32_t parent; /* of a free node: the next free one */
    uint32_t child, next, prev; /* first child; siblings, PT_NONE at the ends */
    uint32_t first;  /* prefix that ends here */
    uint32_t depth;
} pt_node;

typedef struct pt_prefix {
    uint32_t node;       /* PT_LAST: no such prefix */
    uint32_t next, prev; /* others that end at the node */
} pt_prefix;

typedef struct pt_tree {
    pt_node *nodes;
    uint32_t used, room, free; /* nodes in the array, its size, the first free one */
    uint32_t *table;           /* 0 = empty; else a node */
    uint32_t bits, count;      /* of the table; nodes in it */
    pt_prefix *prefixes;
    uint32_t prefix_room;
    uint64_t key;
} pt_tree;

typedef struct pt_found {
    uint32_t prefix, matched; /* blocks that are the same */
} pt_found;

static inline uint64_t pt_home(const pt_tree *t, uint32_t parent, uint64_t hash) {
    uint64_t x = (hash ^ t->key) + (uint64_t)parent * 0x9e3779b97f4a7c15ull;
    x = (x ^ (x >> 32)) * 0xd6e8feb86659fd93ull;
    x = (x ^ (x >> 32)) * 0xd6e8feb86659fd93ull;
    return (x ^ (x >> 32)) >> (64 - t->bits);
}

static inline void pt_free(pt_tree *t) {
    free(t->nodes);
    free(t->table);
    free(t->prefixes);
    memset(t, 0, sizeof *t);
}

/* 0 or -ENOMEM. */
static inline int pt_init(pt_tree *t, uint64_t key) {
    memset(t, 0, sizeof *t);
    t->key = key;
    t->bits = 6;
    t->room = 64;
    t->nodes = (pt_node *)calloc(t->room, sizeof *t->nodes);
    t->table = (uint32_t *)calloc((size_t)1 << t->bits, sizeof *t->table);
    if (!t->nodes || !t->table) {
        pt_free(t);
        return -ENOMEM;
    }
    t->nodes[0].first = PT_LAST;
    t->used = 1;
    return 0;
}

/* The child of `parent` with this hash, or PT_NONE; *slot gets its place in the table, or the empty one it would take. */
static inline uint32_t pt_find(const pt_tree *t, uint32_t parent, uint64_t hash, uint64_t *slot) {
    const uint64_t mask = ((uint64_t)1 << t->bits) - 1;
    uint64_t at = pt_home(t, parent, hash);
    for (; t->table[at]; at = (at + 1) & mask) {
        const pt_node *n = &t->nodes[t->table[at]];
        if (n->hash == hash && n->parent == parent) break;
    }
    *slot = at;
    return t->table[at];
}

static inline int pt_grow_table(pt_tree *t) {
    uint32_t *old = t->table;
    const uint64_t size = (uint64_t)1 << t->bits;
    uint32_t *table = (uint32_t *)calloc((size_t)2 << t->bits, sizeof *table);
    if (!table) return -ENOMEM;
    t->table = table;
    t->bits++;
    for (uint64_t i = 0; i < size; i++) {
        uint64_t slot;
        if (!old[i]) continue;
        pt_find(t, t->nodes[old[i]].parent, t->nodes[old[i]].hash, &slot);
        table[slot] = old[i];
    }
    free(old);
    return 0;
}

/* A new child; PT_NONE: no memory. */
static inline uint32_t pt_add_node(pt_tree *t, uint32_t parent, uint64_t hash) {
    uint64_t slot;
    if ((t->count + 1) * (uint64_t)2 > (uint64_t)1 << t->bits && pt_grow_table(t)) return PT_NONE;
    uint32_t id = t->free;
    if (id) {
        t->free = t->nodes[id].parent;
    } else {
        if (t->used == t->room) {
            if (t->room > UINT32_MAX / 2) return PT_NONE;
            pt_node *grown = (pt_node *)realloc(t->nodes, (size_t)t->room * 2 * sizeof *grown);
            if (!grown) return PT_NONE;
            t->nodes = grown;
            t->room *= 2;
        }
        id = t->used++;
    }
    pt_node *above = &t->nodes[parent], *n = &t->nodes[id];
    *n = (pt_node){hash, parent, PT_NONE, above->child, PT_NONE, PT_LAST, above->depth + 1};
    if (above->child) t->nodes[above->child].prev = id;
    above->child = id;
    pt_find(t, parent, hash, &slot);
    t->table[slot] = id;
    t->count++;
    return id;
}

/* Take an entry out of the table; those behind it that it kept from their place move up. */
static inline void pt_unhash(pt_tree *t, uint32_t id) {
    const uint64_t mask = ((uint64_t)1 << t->bits) - 1;
    uint64_t hole, at;
    pt_find(t, t->nodes[id].parent, t->nodes[id].hash, &hole);
    for (at = (hole + 1) & mask; t->table[at]; at = (at + 1) & mask) {
        const pt_node *n = &t->nodes[t->table[at]];
        if (((at - pt_home(t, n->parent, n->hash)) & mask) >= ((at - hole) & mask)) {
            t->table[hole] = t->table[at];
            hole = at;
        }
    }
    t->table[hole] = 0;
    t->count--;
}

/* Remove nodes, from this one up, that no prefix needs any more. */
static inline void pt_prune(pt_tree *t, uint32_t id) {
    while (id) {
        pt_node *n = &t->nodes[id];
        if (n->child || n->first != PT_LAST) return;
        const uint32_t parent = n->parent;
        pt_unhash(t, id);
        if (n->next) t->nodes[n->next].prev = n->prev;
        if (n->prev) t->nodes[n->prev].next = n->next;
        else t->nodes[parent].child = n->next;
        n->parent = t->free;
        t->free = id;
        id = parent;
    }
}

static inline void pt_remove(pt_tree *t, uint32_t prefix) {
    if (prefix >= t->prefix_room || t->prefixes[prefix].node == PT_LAST) return;
    pt_prefix *p = &t->prefixes[prefix];
    const uint32_t node = p->node;
    if (p->next != PT_LAST) t->prefixes[p->next].prev = p->prev;
    if (p->prev != PT_LAST) t->prefixes[p->prev].next = p->next;
    else t->nodes[node].first = p->next;
    p->node = PT_LAST;
    pt_prune(t, node);
}

static inline uint64_t pt_hash_at(const char *hashes, size_t i) {
    uint64_t value;
    memcpy(&value, hashes + 8 * i, 8);
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    value = __builtin_bswap64(value);
#endif
    return value;
}

/* Hang a prefix of n blocks into the tree, in the place of what had its number. 0 or -ENOMEM, then it is not there. */
static inline int pt_add(pt_tree *t, uint32_t prefix, const char *hashes, size_t n) {
    pt_remove(t, prefix);
    if (!n) return 0;
    if (prefix >= t->prefix_room) {
        uint32_t room = t->prefix_room ? t->prefix_room : 64;
        while (room <= prefix) room = room > UINT32_MAX / 2 ? UINT32_MAX : room * 2;
        pt_prefix *grown = (pt_prefix *)realloc(t->prefixes, (size_t)room * sizeof *grown);
        if (!grown) return -ENOMEM;
        for (uint32_t i = t->prefix_room; i < room; i++) grown[i].node = PT_LAST;
        t->prefixes = grown;
        t->prefix_room = room;
    }
    uint32_t node = 0;
    for (size_t i = 0; i < n; i++) {
        uint64_t slot;
        uint32_t child = pt_find(t, node, pt_hash_at(hashes, i), &slot);
        if (!child && !(child = pt_add_node(t, node, pt_hash_at(hashes, i)))) {
            pt_prune(t, node);
            return -ENOMEM;
        }
        node = child;
    }
    pt_node *last = &t->nodes[node];
    t->prefixes[prefix] = (pt_prefix){node, last->first, PT_LAST};
    if (last->first != PT_LAST) t->prefixes[last->first].prev = prefix;
    last->first = prefix;
    return 0;
}

/* The prefixes at `top` and below, but not below its child `without`; returns how many *out got. At most `steps` nodes
 * are looked at. */
static inline size_t pt_below(const pt_tree *t, uint32_t top, uint32_t without, uint32_t matched, pt_found *out,
                              size_t most, size_t *steps) {
    size_t n = 0;
    uint32_t at = top;
    for (;;) {
        for (uint32_t p = t->nodes[at].first; p != PT_LAST && n < most; p = t->prefixes[p].next)
            out[n++] = (pt_found){p, matched};
        if (n == most || !*steps) return n;
        --*steps;
        uint32_t next = t->nodes[at].child;
        if (next && next == without) next = t->nodes[next].next;
        while (!next) { /* nothing deeper: a sibling, of this node or of one above it */
            if (at == top) return n;
            next = t->nodes[at].next;
            if (next && next == without) next = t->nodes[next].next;
            at = t->nodes[at].parent;
        }
        at = next;
    }
}

/* Prefixes that share blocks with the n hashes, those that share most first; returns how many *out got. Those that end
 * within the common part come before those that go on elsewhere from the same block. */
static inline size_t pt_match(const pt_tree *t, const char *hashes, size_t n, pt_found *out, size_t most, size_t steps) {
    uint32_t node = 0, without = PT_NONE;
    size_t found = 0;
    uint64_t slot;
    for (size_t i = 0; i < n; i++) {
        const uint32_t child = pt_find(t, node, pt_hash_at(hashes, i), &slot);
        if (!child) break;
        node = child;
    }
    for (; node && found < most && steps; node = t->nodes[node].parent) {
        found += pt_below(t, node, without, t->nodes[node].depth, out + found, most - found, &steps);
        without = node;
    }
    return found;
}

#endif
