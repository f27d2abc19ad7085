/* Readiness of descriptors, the wake-up from other threads, clocks: epoll on Linux, kqueue on macOS and the BSDs.
 *
 * One ev is one pollable descriptor (ev.fd), so an event loop above can wait for all connections at once. Interest is
 * level-triggered and kept by the caller: ev_set gets the old and the new set of EV_* bits. Errors and a peer that is
 * gone in both directions are always reported as EV_ERR while any interest is registered.
 */
#ifndef PION_EV_H
#define PION_EV_H

#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#if defined(__linux__)
#define EV_EPOLL 1
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#ifndef SYS_epoll_pwait2
#define SYS_epoll_pwait2 441
#endif
#else
#include <sys/event.h>
#include <sys/types.h>
#endif

enum { EV_IN = 1, EV_OUT = 2, EV_HUP = 4 /* the peer sends no more; asked for when input is not */, EV_ERR = 8 };

typedef struct ev_event {
    void *data;
    int what;
} ev_event;

typedef struct ev {
    int fd;
    int wake_read, wake_write;
    int no_pwait2;
} ev;

#define EV_BATCH 128

static inline uint64_t ev_now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static inline void ev_close(ev *e) {
    if (e->fd >= 0) close(e->fd);
    if (e->wake_read >= 0) close(e->wake_read);
    if (e->wake_write >= 0 && e->wake_write != e->wake_read) close(e->wake_write);
    e->fd = e->wake_read = e->wake_write = -1;
}

/* Change what is wanted of fd from `before` to `after` (0: not registered). 0 or -errno. */
static inline int ev_set(ev *e, int fd, void *data, int before, int after) {
    if (before == after) return 0;
#if defined(EV_EPOLL)
    struct epoll_event x;
    memset(&x, 0, sizeof x);
    x.data.ptr = data;
    if (after & EV_IN) x.events |= EPOLLIN;
    if (after & EV_OUT) x.events |= EPOLLOUT;
    if (after & EV_HUP) x.events |= EPOLLRDHUP;
    int op = !after ? EPOLL_CTL_DEL : !before ? EPOLL_CTL_ADD : EPOLL_CTL_MOD;
    return epoll_ctl(e->fd, op, fd, &x) < 0 ? -errno : 0;
#else
    /* A reading filter stands for EV_IN and EV_HUP: kqueue reports EV_EOF through it. NOTE_LOWAT keeps bytes that
     * nobody wants yet from waking us. */
    struct kevent x[2];
    int n = 0;
    int reading = after & (EV_IN | EV_HUP), was_reading = before & (EV_IN | EV_HUP);
    if (reading != was_reading) {
        EV_SET(&x[n], (uintptr_t)fd, EVFILT_READ, reading ? EV_ADD : EV_DELETE, reading == EV_HUP ? NOTE_LOWAT : 0,
               reading == EV_HUP ? INT32_MAX : 0, data);
        n++;
    }
    if ((after ^ before) & EV_OUT) {
        EV_SET(&x[n], (uintptr_t)fd, EVFILT_WRITE, after & EV_OUT ? EV_ADD : EV_DELETE, 0, 0, data);
        n++;
    }
    return n && kevent(e->fd, x, n, NULL, 0, NULL) < 0 ? -errno : 0;
#endif
}

/* Wait at most timeout_ns (0: only look). Returns the number of events, or -errno; EINTR counts as none. */
static inline int ev_wait(ev *e, ev_event *out, int max, int64_t timeout_ns) {
    struct timespec ts;
    ts.tv_sec = (time_t)(timeout_ns / 1000000000);
    ts.tv_nsec = (long)(timeout_ns % 1000000000);
    if (max > EV_BATCH) max = EV_BATCH;
#if defined(EV_EPOLL)
    struct epoll_event got[EV_BATCH];
    int n = -1;
    if (timeout_ns && !e->no_pwait2) {
        n = (int)syscall(SYS_epoll_pwait2, e->fd, got, max, &ts, NULL, (size_t)8);
        if (n < 0 && (errno == ENOSYS || errno == EPERM)) e->no_pwait2 = 1;
    }
    if (!timeout_ns || e->no_pwait2) n = epoll_wait(e->fd, got, max, (int)(timeout_ns / 1000000));
    if (n < 0) return errno == EINTR ? 0 : -errno;
    for (int i = 0; i < n; i++) {
        uint32_t x = got[i].events;
        out[i].data = got[i].data.ptr;
        out[i].what = (x & EPOLLIN ? EV_IN : 0) | (x & EPOLLOUT ? EV_OUT : 0) | (x & EPOLLRDHUP ? EV_HUP : 0) |
                      (x & (EPOLLERR | EPOLLHUP) ? EV_ERR : 0);
    }
#else
    struct kevent got[EV_BATCH];
    int n = kevent(e->fd, NULL, 0, got, max, &ts);
    if (n < 0) return errno == EINTR ? 0 : -errno;
    for (int i = 0; i < n; i++) {
        out[i].data = got[i].udata;
        out[i].what = got[i].filter == EVFILT_WRITE ? EV_OUT : EV_IN;
        if (got[i].flags & EV_EOF) out[i].what |= got[i].filter == EVFILT_WRITE ? EV_ERR : EV_HUP;
        if (got[i].flags & EV_ERROR) out[i].what |= EV_ERR;
    }
#endif
    return n;
}

/* May be called from any thread. */
static inline void ev_wake(ev *e) {
    uint64_t one = 1;
#if defined(EV_EPOLL)
    ssize_t n = write(e->wake_write, &one, sizeof one);
#else
    ssize_t n = write(e->wake_write, &one, 1);
#endif
    (void)n; /* full: a wake-up is already on its way */
}

static inline void ev_woken(ev *e) {
    uint64_t counts[32];
    while (read(e->wake_read, counts, sizeof counts) == (ssize_t)sizeof counts) continue;
}

static inline int ev_nonblocking(int fd) {
    int flags = fcntl(fd, F_GETFL);
    if (flags < 0 || fcntl(fd, F_SETFL, flags | O_NONBLOCK) < 0) return -errno;
    flags = fcntl(fd, F_GETFD);
    if (flags < 0 || fcntl(fd, F_SETFD, flags | FD_CLOEXEC) < 0) return -errno;
    return 0;
}

/* The wake-up is reported with data == e. 0 or -errno. */
static inline int ev_open(ev *e) {
    memset(e, 0, sizeof *e);
    e->fd = e->wake_read = e->wake_write = -1;
    int rc = 0;
#if defined(EV_EPOLL)
    e->fd = epoll_create1(EPOLL_CLOEXEC);
    e->wake_read = e->wake_write = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (e->fd < 0 || e->wake_read < 0) rc = -errno;
#else
    int pair[2];
    e->fd = kqueue();
    if (e->fd < 0 || pipe(pair) < 0) {
        rc = -errno;
    } else {
        e->wake_read = pair[0];
        e->wake_write = pair[1];
        fcntl(e->fd, F_SETFD, FD_CLOEXEC);
        if (!(rc = ev_nonblocking(pair[0]))) rc = ev_nonblocking(pair[1]);
    }
#endif
    if (!rc) rc = ev_set(e, e->wake_read, e, 0, EV_IN);
    if (rc) ev_close(e);
    return rc;
}

/* What every accepted socket gets. Options that do not apply (TCP ones on a Unix socket) fail silently. */
static inline int ev_prepare_socket(int fd) {
    int one = 1, rc = ev_nonblocking(fd);
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &one, sizeof one);
#if defined(SO_NOSIGPIPE)
    setsockopt(fd, SOL_SOCKET, SO_NOSIGPIPE, &one, sizeof one);
#endif
    return rc;
}

#endif
