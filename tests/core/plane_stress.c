/* The plane and its movers under a thread or address sanitizer, without Python: clients that read, write, stall and vanish.
 *
 *   plane_stress DIRECTORY SECONDS
 *
 * Commands answered here, as Plane (plane.pyx) does with its handler: FILE offset n | STORE body | OTHER.
 */
#include <arpa/inet.h>
#include <stdio.h>

#include "plane.h"

#define CLIENTS 8
#define FILE_BYTES (6u << 20)

static char *content;
static fdref *file;
static char stored_dir[512];
static _Atomic int stop_clients, failures;
static _Atomic long done_ops;

static void check(int ok, const char *what) {
    if (ok) return;
    fprintf(stderr, "FAILED: %s\n", what);
    atomic_fetch_add(&failures, 1);
}

/* ---- the server's side ---- */

static int64_t number(const conn *c, size_t i) {
    size_t n;
    int64_t v = -1;
    const char *p = conn_arg(c, i, &n);
    check(resp_number(p, n, &v), "a number");
    return v;
}

static void go_on(plane *p, conn *c) {
    if (c->where != AT_HOME) return;
    conn_run(p, c);
    if (conn_keep_window(c)) conn_end(p, c);
}

static void serve(plane *p, conn *c) {
    plane_touch(p, c);
    if (c->waiting == WAIT_STREAM) {
        char path[600];
        snprintf(path, sizeof path, "%s/s%llu", stored_dir, (unsigned long long)c->id);
        fdref *to = fdref_new(open(path, O_RDWR | O_CREAT | O_TRUNC, 0600), NULL);
        sink *s = sink_new(to, 0, c->parser.bulk_len, STREAM_RAW, 0, 0);
        fdref_unref(to);
        if (conn_stream(p, c, s)) conn_end(p, c);
    } else if (c->waiting == WAIT_FRAME) {
        size_t n;
        const char *name = conn_arg(c, 0, &n);
        char text[64];
        c->waiting = WAIT_NO;
        if (resp_is(name, n, "FILE", 4)) {
            int64_t offset = number(c, 1), size = number(c, 2);
            extents *e = extents_new(2, STREAM_RAW, 0);
            for (int i = 0; i < 2; i++) {
                e->seg[i].ref = fdref_ref(file);
                e->seg[i].offset = offset + (i ? size / 2 : 0);
                e->seg[i].n = (uint64_t)(i ? size - size / 2 : size / 2);
            }
            extents_seal(e);
            outq_put(&c->out, &p->spares, text, resp_put_num(text, '$', size));
            conn_put_extents(p, c, e);
            extents_unref(e);
            outq_put(&c->out, &p->spares, "\r\n", 2);
        } else if (resp_is(name, n, "STORE", 5)) {
            check(!c->sink || (sink_done(c->sink) && !c->sink->error), "a complete sink");
            outq_put(&c->out, &p->spares, text,
                     resp_put_num(text, ':', c->sink ? (int64_t)c->sink->crc : -1));
        } else {
            outq_put(&c->out, &p->spares, "+OTHER\r\n", 8);
        }
        conn_consume(c);
    }
    go_on(p, c);
}

static void bury(plane *p) {
    while (p->dead.n) {
        conn *c = p->dead.items[--p->dead.n];
        plane_forget(p, c);
        sink_unref(c->sink);
        free(c);
    }
}

static void serve_until(plane *p, int listener, double seconds) {
    uint64_t end = ev_now_ns() + (uint64_t)(seconds * 1e9);
    unsigned turns = 0;
    while (ev_now_ns() < end || p->all.n) {
        int fd;
        if (ev_now_ns() >= end) atomic_store(&stop_clients, 1);
        while ((fd = accept(listener, NULL, NULL)) >= 0) {
            ev_prepare_socket(fd);
            conn *c = conn_new(p, fd);
            c->authed = 1;
            conn_set_limits(c);
            conn_want(p, c);
        }
        plane_turn(p, 1000000);
        for (conn *c; (c = plane_pop_slow(p));)
            if (c->where == AT_HOME) serve(p, c);
        plane_flush(p);
        if (++turns % 64 == 0) plane_tick(p);
        if (turns % 500 == 0 && p->all.n) conn_end(p, p->all.items[turns % p->all.n]); /* CLIENT KILL */
        bury(p);
    }
}

/* ---- the clients' side ---- */

static int connect_to(const struct sockaddr_in *to) {
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    struct timeval limit = {20, 0};
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    if (connect(fd, (const struct sockaddr *)to, sizeof *to)) {
        close(fd);
        return -1;
    }
    return fd;
}

static int read_all(int fd, char *to, size_t n) {
    while (n) {
        ssize_t k = recv(fd, to, n, 0);
        if (k <= 0) return 0;
        to += k, n -= (size_t)k;
    }
    return 1;
}

static int write_all(int fd, const char *p, size_t n) {
    while (n) {
        ssize_t k = send(fd, p, n, STREAM_NOSIGNAL);
        if (k <= 0) return 0;
        p += k, n -= (size_t)k;
    }
    return 1;
}

/* One exchange. 0: the connection is gone (the server kills some, on purpose). */
static int exchange(int fd, unsigned *seed, char *buf, int id) {
    char head[160], text[64];
    unsigned what = (unsigned)rand_r(seed) % 6;
    size_t size = (size_t)rand_r(seed) % (what == 1 ? 2u << 20 : FILE_BYTES / 2);
    size_t offset = (size_t)rand_r(seed) % (FILE_BYTES / 2);
    int n;
    switch (what) {
    case 0: case 1: {                     /* FILE, read at once or slowly, or abandoned */
        char a[24], b[24];
        snprintf(a, sizeof a, "%zu", offset);
        snprintf(b, sizeof b, "%zu", size);
        n = snprintf(head, sizeof head, "*3\r\n$4\r\nFILE\r\n$%zu\r\n%s\r\n$%zu\r\n%s\r\n*1\r\n$5\r\nOTHER\r\n", strlen(a), a, strlen(b), b);
        if (!write_all(fd, head, (size_t)n)) return 0;
        n = snprintf(text, sizeof text, "$%zu\r\n", size);
        if (!read_all(fd, head, (size_t)n)) return 0;
        check(!memcmp(head, text, (size_t)n), "the header of a file");
        if (rand_r(seed) % 8 == 0) return 0; /* vanish */
        if (rand_r(seed) % 4 == 0) usleep(3000);
        if (!read_all(fd, buf, size + 2 + 8)) return 0;
        check(!memcmp(buf, content + offset, size), "the bytes of a file");
        check(!memcmp(buf + size, "\r\n+OTHER\r\n", 10), "what follows a file");
        break;
    }
    case 2: case 3: {                     /* STORE, whole or cut off */
        size += 300000;
        n = snprintf(head, sizeof head, "*2\r\n$5\r\nSTORE\r\n$%zu\r\n", size);
        if (!write_all(fd, head, (size_t)n)) return 0;
        if (rand_r(seed) % 8 == 0) {
            write_all(fd, content, size / 2);
            return 0;
        }
        size_t first = size / 3;
        if (!write_all(fd, content + offset, first)) return 0;
        if (rand_r(seed) % 4 == 0) usleep(3000);
        if (!write_all(fd, content + offset + first, size - first) || !write_all(fd, "\r\n", 2)) return 0;
        n = snprintf(text, sizeof text, ":%u\r\n", crc32c(0, content + offset, size));
        if (!read_all(fd, head, (size_t)n)) return 0;
        check(!memcmp(head, text, (size_t)n), "the checksum of a stored body");
        break;
    }
    case 4:                               /* SET and GET of a large value of this client's */
        size = size / 2 + 1;
        n = snprintf(head, sizeof head, "*3\r\n$3\r\nSET\r\n$2\r\nk%d\r\n$%zu\r\n", id, size);
        if (!write_all(fd, head, (size_t)n) || !write_all(fd, content + offset, size)) return 0;
        n = snprintf(head, sizeof head, "\r\n*2\r\n$3\r\nGET\r\n$2\r\nk%d\r\n", id);
        if (!write_all(fd, head, (size_t)n)) return 0;
        n = snprintf(text, sizeof text, "+OK\r\n$%zu\r\n", size);
        if (!read_all(fd, head, (size_t)n) || !read_all(fd, buf, size + 2)) return 0;
        check(!memcmp(head, text, (size_t)n) && !memcmp(buf, content + offset, size), "a value");
        break;
    default:
        if (!write_all(fd, "PING\r\nOTHER\r\n", 13) || !read_all(fd, head, 15)) return 0;
        check(!memcmp(head, "+PONG\r\n+OTHER\r\n", 15), "small replies");
    }
    atomic_fetch_add(&done_ops, 1);
    return 1;
}

static struct sockaddr_in address;

static void *client(void *arg) {
    int id = (int)(intptr_t)arg;
    unsigned seed = (unsigned)id * 77u + 1;
    char *buf = (char *)malloc(FILE_BYTES + 64);
    while (!atomic_load(&stop_clients)) {
        int fd = connect_to(&address);
        if (fd < 0) continue;
        while (!atomic_load(&stop_clients) && exchange(fd, &seed, buf, id)) continue;
        close(fd);
    }
    free(buf);
    return NULL;
}

int main(int argc, char **argv) {
    if (argc != 3) return 2;
    char path[600];
    plane_limits limits;
    pthread_t threads[CLIENTS];
    socklen_t length = sizeof address;
    signal(SIGPIPE, SIG_IGN);
    snprintf(stored_dir, sizeof stored_dir, "%s", argv[1]);
    content = (char *)calloc(1, FILE_BYTES + 300000);
    for (size_t i = 0; i < FILE_BYTES; i += 8) {
        uint64_t x = i * 0x9e3779b97f4a7c15u;
        memcpy(content + i, &x, 8);
    }
    snprintf(path, sizeof path, "%s/content", argv[1]);
    int fd = open(path, O_RDWR | O_CREAT | O_TRUNC, 0600);
    if (pwrite(fd, content, FILE_BYTES, 0) != (ssize_t)FILE_BYTES) return 2;
    jobs *closer = jobs_new(1, NULL, NULL);
    file = fdref_new(fd, closer);

    memset(&limits, 0, sizeof limits);
    limits.parse = RESP_LIMITS_DEFAULT;
    limits.stream_min = 256 << 10;
    limits.preauth_output = 64 << 10;
    limits.max_output = 4 << 20;
    limits.max_slots = 64;
    limits.input_total = limits.output_total = (size_t)1 << 30;
    limits.slice = 1 << 20;
    limits.batch_ns = 1000000;
    limits.send_timeout_ns = limits.linger_ns = 1000000000u;
    ks *keyspace = ks_new(16, 1, 2);
    plane *p = plane_new(keyspace, &limits, 3);
    fast_add(p, FAST_PING, "PING", 4, -1, 0);
    fast_add(p, FAST_GET, "GET", 3, 2, 0);
    fast_add(p, FAST_SET, "SET", 3, -3, FLAG_WRITE);
    stream_add(p, "STORE", 5, 1);

    int listener = socket(AF_INET, SOCK_STREAM, 0);
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (bind(listener, (struct sockaddr *)&address, sizeof address) || listen(listener, 64)) return 2;
    getsockname(listener, (struct sockaddr *)&address, &length);
    ev_nonblocking(listener);
    for (intptr_t i = 0; i < CLIENTS; i++) pthread_create(&threads[i], NULL, client, (void *)i);
    serve_until(p, listener, atof(argv[2]));
    for (int i = 0; i < CLIENTS; i++) pthread_join(threads[i], NULL);
    close(listener);
    serve_until(p, listener, 0);
    plane_end_all(p);
    bury(p);
    check(p->input_bytes == 0, "no bytes of half-received commands are left");
    check(p->pinned == 0 && p->lent == 0, "nothing is pinned or lent");
    plane_free(p);
    ks_clear(keyspace);
    free(keyspace->dead);
    free(keyspace);
    fdref_unref(file);
    jobs_free(closer);
    free(content);
    printf("%ld exchanges, %d failures\n", atomic_load(&done_ops), atomic_load(&failures));
    return atomic_load(&failures) != 0 || atomic_load(&done_ops) == 0;
}
