/* Load generator of the benchmarks: one raw-socket program for every server, so that the client costs the same.
 *
 *   load small HOST PORT ping|get|set CONNS PIPELINE TOTAL KEYS BYTES   -> requests/s, p50 us, p99 us
 *   load xfer  HOST PORT REQUEST_FILE REPLY_BYTES REPS [PATCH_AT WIDTH] -> seconds: median, best
 *   load pairs HOST PORT CONNS SECONDS REQUEST_FILE PATCH_AT WIDTH      -> requests/s
 *   load ping  HOST PORT SECONDS INTERVAL_US                            -> p50 us, p99 us, max us, count
 *   load copy  BYTES REPS                                               -> seconds: median, best   (bare send -> recv)
 *   load sink  BYTES REPS DIRECTORY                                     -> seconds: median, best   (bare recv + write)
 *
 * `xfer` sends a file and reads an exact number of reply bytes into one reused buffer. With PATCH_AT the decimal
 * counter of WIDTH digits at that offset is replaced before each round, to name a fresh key or session.
 * `pairs` sends a file of two commands that are answered +OK on every connection, with the connection's number at
 * PATCH_AT, again after each pair of replies.
 * CPU=n in the environment pins the program; SERVER_CPU=n pins the forked half of copy and sink.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define PIECE ((size_t)1 << 20)

static void die(const char *what) {
    perror(what);
    exit(1);
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void pin(const char *variable) {
    const char *cpu = getenv(variable);
    if (!cpu) return;
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(atoi(cpu), &set);
    sched_setaffinity(0, sizeof set, &set);
}

static char *buffer(size_t size) {
    char *p = mmap(NULL, size + PIECE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) die("mmap");
    madvise(p, size + PIECE, MADV_HUGEPAGE);
    memset(p, 'x', size + PIECE);
    return p;
}

static int dial(const char *host, int port) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    inet_pton(AF_INET, host, &address.sin_addr);
    int fd = socket(AF_INET, SOCK_STREAM, 0), one = 1;
    if (connect(fd, (void *)&address, sizeof address)) die("connect");
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    return fd;
}

static void send_all(int fd, const char *p, size_t n) {
    while (n) {
        ssize_t k = send(fd, p, n, MSG_NOSIGNAL);
        if (k < 0 && errno == EINTR) continue;
        if (k < 0) die("send");
        p += k;
        n -= (size_t)k;
    }
}

static void recv_all(int fd, char *p, size_t n) {
    while (n) {
        ssize_t k = recv(fd, p, n, 0);
        if (k < 0 && errno == EINTR) continue;
        if (k <= 0) {
            fprintf(stderr, "the peer closed with %zu bytes missing\n", n);
            exit(1);
        }
        p += k;
        n -= (size_t)k;
    }
}

static void report(double *seconds, long n) {
    qsort(seconds, (size_t)n, sizeof *seconds, by_value);
    printf("%.9f %.9f\n", seconds[n / 2], seconds[0]);
}

/* ---- small: many connections, each with PIPELINE commands in flight ---- */
struct client {
    int fd;
    char *block;
    size_t need, got;
    double since;
};

static int small(char **argv) {
    const char *host = argv[0], *kind = argv[2];
    int port = atoi(argv[1]), conns = atoi(argv[3]), pipeline = atoi(argv[4]), keys = atoi(argv[6]);
    long total = atol(argv[5]), blocks = total / pipeline, sent = 0, done = 0;
    int bytes = atoi(argv[7]);
    int get = !strcmp(kind, "get"), set = !strcmp(kind, "set");
    char *one = malloc((size_t)bytes + 128);
    char *value = malloc((size_t)bytes);
    memset(value, 'x', (size_t)bytes);
    int length, key_at = -1;
    size_t reply;
    if (get) {
        length = sprintf(one, "*2\r\n$3\r\nGET\r\n$12\r\nkey:00000000\r\n");
        key_at = length - 10;
        reply = (size_t)snprintf(NULL, 0, "$%d\r\n", bytes) + (size_t)bytes + 2;
    } else if (set) {
        length = sprintf(one, "*3\r\n$3\r\nSET\r\n$12\r\nkey:00000000\r\n");
        key_at = length - 10;
        length += sprintf(one + length, "$%d\r\n", bytes);
        memcpy(one + length, value, (size_t)bytes);
        memcpy(one + length + bytes, "\r\n", 2);
        length += bytes + 2;
        reply = 5;
    } else {
        length = sprintf(one, "*1\r\n$4\r\nPING\r\n");
        reply = 7;
    }
    if (get) {
        int fd = dial(host, port);
        char *line = malloc((size_t)bytes + 128), ok[5];
        for (int i = 0; i < keys; i++) {
            int n = sprintf(line, "*3\r\n$3\r\nSET\r\n$12\r\nkey:%08d\r\n$%d\r\n", i, bytes);
            memcpy(line + n, value, (size_t)bytes);
            memcpy(line + n + bytes, "\r\n", 2);
            send_all(fd, line, (size_t)(n + bytes + 2));
            recv_all(fd, ok, 5);
        }
        close(fd);
    }
    struct client *clients = calloc((size_t)conns, sizeof *clients);
    double *latency = malloc(sizeof(double) * (size_t)(blocks + conns + 1));
    char *sinkhole = malloc(PIECE);
    unsigned seed = 1;
    long fresh = 0;
    int ep = epoll_create1(0);
    for (int i = 0; i < conns; i++) {
        clients[i].fd = dial(host, port);
        clients[i].block = malloc((size_t)length * (size_t)pipeline);
        for (int j = 0; j < pipeline; j++) memcpy(clients[i].block + (size_t)j * (size_t)length, one, (size_t)length);
        struct epoll_event event = {.events = EPOLLIN, .data.ptr = &clients[i]};
        epoll_ctl(ep, EPOLL_CTL_ADD, clients[i].fd, &event);
    }
#define FIRE(c)                                                                             \
    do {                                                                                    \
        for (int j = 0; key_at >= 0 && j < pipeline; j++) {                                 \
            char digits[16];                                                                \
            snprintf(digits, sizeof digits, "%08ld", keys ? (long)(rand_r(&seed) % (unsigned)keys) : fresh++ % 100000000); \
            memcpy((c)->block + (size_t)j * (size_t)length + key_at, digits, 8);            \
        }                                                                                   \
        (c)->since = now();                                                                 \
        (c)->got = 0;                                                                       \
        (c)->need = reply * (size_t)pipeline;                                               \
        send_all((c)->fd, (c)->block, (size_t)length * (size_t)pipeline);                   \
        sent++;                                                                             \
    } while (0)
    double start = now();
    for (int i = 0; i < conns && sent < blocks; i++) FIRE(&clients[i]);
    struct epoll_event events[256];
    while (done < blocks) {
        int n = epoll_wait(ep, events, 256, 10000);
        if (n == 0) {
            fprintf(stderr, "no answer for 10 s\n");
            return 1;
        }
        for (int i = 0; i < n; i++) {
            struct client *c = events[i].data.ptr;
            ssize_t k = recv(c->fd, sinkhole, PIECE, 0);
            if (k <= 0) {
                fprintf(stderr, "the peer closed\n");
                return 1;
            }
            c->got += (size_t)k;
            if (c->got >= c->need) {
                latency[done++] = now() - c->since;
                if (sent < blocks) FIRE(c);
            }
        }
    }
    double elapsed = now() - start;
    qsort(latency, (size_t)done, sizeof *latency, by_value);
    printf("%.0f %.1f %.1f\n", (double)(done * pipeline) / elapsed, latency[done / 2] * 1e6,
           latency[(long)((double)done * 0.99)] * 1e6);
    return 0;
}

static char *contents(const char *path, size_t *size) {
    int file = open(path, O_RDONLY);
    struct stat st;
    if (file < 0 || fstat(file, &st)) die(path);
    *size = (size_t)st.st_size;
    char *out = buffer(*size);
    for (size_t got = 0; got < *size;) {
        ssize_t k = pread(file, out + got, *size - got, (off_t)got);
        if (k <= 0) die("read");
        got += (size_t)k;
    }
    close(file);
    return out;
}

/* ---- pairs: many connections, each with a write and its COMMIT in flight ---- */
static int pairs(char **argv) {
    static const char wanted[] = "+OK\r\n+OK\r\n";
    const size_t need = sizeof wanted - 1;
    int conns = atoi(argv[2]), width = atoi(argv[6]), open_ = conns;
    size_t size;
    char *request = contents(argv[4], &size), reply[64];
    struct client *clients = calloc((size_t)conns, sizeof *clients);
    int ep = epoll_create1(0);
    for (int i = 0; i < conns; i++) {
        char digits[32];
        clients[i].fd = dial(argv[0], atoi(argv[1]));
        clients[i].block = malloc(size);
        memcpy(clients[i].block, request, size);
        snprintf(digits, sizeof digits, "%0*d", width, i);
        memcpy(clients[i].block + atol(argv[5]), digits, (size_t)width);
        struct epoll_event event = {.events = EPOLLIN, .data.ptr = &clients[i]};
        epoll_ctl(ep, EPOLL_CTL_ADD, clients[i].fd, &event);
    }
    long done = 0;
    double start = now(), until = start + atof(argv[3]);
    for (int i = 0; i < conns; i++) send_all(clients[i].fd, clients[i].block, size);
    struct epoll_event events[256];
    while (open_) {
        int n = epoll_wait(ep, events, 256, 10000);
        if (n == 0) {
            fprintf(stderr, "no answer for 10 s\n");
            return 1;
        }
        for (int i = 0; i < n; i++) {
            struct client *c = events[i].data.ptr;
            ssize_t k = recv(c->fd, reply, need - c->got, 0);
            if (k <= 0 || memcmp(reply, wanted + c->got, (size_t)k)) {
                fprintf(stderr, "not +OK: %.*s\n", (int)(k > 0 ? k : 0), reply);
                return 1;
            }
            c->got += (size_t)k;
            if (c->got < need) continue;
            c->got = 0;
            done++;
            if (now() < until) send_all(c->fd, c->block, size);
            else open_--;
        }
    }
    printf("%.1f\n", (double)done / (now() - start));
    return 0;
}

/* ---- xfer: one request file, one exact reply length ---- */
static int xfer(int argc, char **argv) {
    int fd = dial(argv[0], atoi(argv[1]));
    size_t size, want = strtoull(argv[3], NULL, 10);
    long reps = atol(argv[4]), patch = argc > 5 ? atol(argv[5]) : -1;
    int width = argc > 6 ? atoi(argv[6]) : 0;
    char *request = contents(argv[2], &size), *reply = buffer(want);
    double *seconds = malloc(sizeof(double) * (size_t)reps);
    for (long i = -1; i < reps; i++) {
        if (patch >= 0) {
            char digits[32];
            snprintf(digits, sizeof digits, "%0*ld", width, i + 1);
            memcpy(request + patch, digits, (size_t)width);
        }
        double since = now();
        send_all(fd, request, size);
        recv_all(fd, reply, want);
        if (i >= 0) seconds[i] = now() - since;
        if (reply[0] == '-') {
            fprintf(stderr, "refused: %.*s\n", (int)(want < 200 ? want : 200), reply);
            return 1;
        }
    }
    report(seconds, reps);
    return 0;
}

/* ---- ping: latency of PING on its own connection ---- */
static int ping(char **argv) {
    int fd = dial(argv[0], atoi(argv[1]));
    double until = now() + atof(argv[2]);
    useconds_t gap = (useconds_t)atoi(argv[3]);
    size_t n = 0, room = 1 << 20;
    double *seconds = malloc(room * sizeof *seconds);
    char pong[7];
    while (now() < until && n < room) {
        double since = now();
        send_all(fd, "*1\r\n$4\r\nPING\r\n", 14);
        recv_all(fd, pong, 7);
        seconds[n++] = now() - since;
        if (gap) usleep(gap);
    }
    qsort(seconds, n, sizeof *seconds, by_value);
    printf("%.1f %.1f %.1f %zu\n", seconds[n / 2] * 1e6, seconds[(size_t)((double)n * 0.99)] * 1e6, seconds[n - 1] * 1e6, n);
    return 0;
}

/* ---- bare socket baselines ---- */
static int listener(int *port) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t length = sizeof address;
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    if (bind(fd, (void *)&address, sizeof address) || listen(fd, 4)) die("listen");
    getsockname(fd, (void *)&address, &length);
    *port = ntohs(address.sin_port);
    return fd;
}

static int copy(char **argv) {
    size_t size = strtoull(argv[0], NULL, 10);
    long reps = atol(argv[1]);
    int port, server = listener(&port);
    pid_t child = fork();
    if (!child) {
        pin("SERVER_CPU");
        char *data = buffer(size), go;
        int fd = accept(server, NULL, NULL), one = 1;
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
        while (recv(fd, &go, 1, 0) == 1) send_all(fd, data, size);
        _exit(0);
    }
    int fd = dial("127.0.0.1", port);
    char *reply = buffer(size);
    double *seconds = malloc(sizeof(double) * (size_t)reps);
    for (long i = -1; i < reps; i++) {
        double since = now();
        send_all(fd, "x", 1);
        recv_all(fd, reply, size);
        if (i >= 0) seconds[i] = now() - since;
    }
    close(fd);
    waitpid(child, NULL, 0);
    report(seconds, reps);
    return 0;
}

static int sink(char **argv) {
    size_t size = strtoull(argv[0], NULL, 10);
    long reps = atol(argv[1]);
    const char *directory = argv[2];
    int port, server = listener(&port);
    pid_t child = fork();
    if (!child) {
        pin("SERVER_CPU");
        char *piece = buffer(PIECE), name[4096];
        int fd = accept(server, NULL, NULL);
        for (long i = 0; i < reps + 1; i++) {
            snprintf(name, sizeof name, "%s/sink.%ld", directory, i);
            int file = open(name, O_CREAT | O_TRUNC | O_WRONLY, 0600);
            if (file < 0) die(name);
            for (size_t left = size; left;) {
                ssize_t k = recv(fd, piece, left < PIECE ? left : PIECE, 0);
                if (k <= 0) _exit(1);
                if (write(file, piece, (size_t)k) != k) die("write");
                left -= (size_t)k;
            }
            send_all(fd, "k", 1);
            close(file);
        }
        for (long i = 0; i < reps + 1; i++) {
            snprintf(name, sizeof name, "%s/sink.%ld", directory, i);
            unlink(name);
        }
        _exit(0);
    }
    int fd = dial("127.0.0.1", port);
    char *data = buffer(size), ok;
    double *seconds = malloc(sizeof(double) * (size_t)reps);
    for (long i = -1; i < reps; i++) {
        double since = now();
        send_all(fd, data, size);
        recv_all(fd, &ok, 1);
        if (i >= 0) seconds[i] = now() - since;
    }
    close(fd);
    waitpid(child, NULL, 0);
    report(seconds, reps);
    return 0;
}

int main(int argc, char **argv) {
    const char *mode = argc > 1 ? argv[1] : "";
    pin("CPU");
    if (!strcmp(mode, "small") && argc == 10) return small(argv + 2);
    if (!strcmp(mode, "xfer") && argc >= 7) return xfer(argc - 2, argv + 2);
    if (!strcmp(mode, "pairs") && argc == 9) return pairs(argv + 2);
    if (!strcmp(mode, "ping") && argc == 6) return ping(argv + 2);
    if (!strcmp(mode, "copy") && argc == 4) return copy(argv + 2);
    if (!strcmp(mode, "sink") && argc == 5) return sink(argv + 2);
    fprintf(stderr, "usage: see the head of load.c\n");
    return 2;
}
