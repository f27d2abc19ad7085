/* Preloaded under a store to break its file system calls, one at a time.
 *
 * Calls that change something below one directory are counted. The call with an armed number fails, writes only half, or
 * is where the process stops (SIGKILL, before the call). Every call that succeeded is also written to a log, with the
 * bytes it wrote, from which disk.py computes what a power cut would leave.
 *
 * A record of the log: struct entry, then path, other path, data. Paths are relative to the directory.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum { NONE, STOP, FAIL, SHORT, FULL };
enum { OP_CREATE = 1, OP_WRITE, OP_TRUNCATE, OP_SYNC, OP_RENAME, OP_UNLINK, OP_LINK, OP_MKDIR, OP_MARK, OP_RESERVE };

struct entry {
    uint32_t op, path_len, other_len, data_len;
    uint64_t inode, offset;
    int64_t number;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char root[4096];
static size_t root_len;
static int mode, error_number, log_fd = -1;
static long armed = -1, count;

void fault_root(const char *path) {
    snprintf(root, sizeof root, "%s", path);
    root_len = strlen(root);
}

void fault_arm(int how, long at, int error) {
    mode = how;
    armed = at;
    error_number = error;
    count = 0;
}

void fault_log(int fd) { log_fd = fd; }
long fault_count(void) { return count; }

static void put(const void *data, size_t n) {
    const char *p = (const char *)data;
    while (n) {
        ssize_t done = syscall(SYS_write, log_fd, p, n);
        if (done <= 0) abort();
        p += done;
        n -= (size_t)done;
    }
}

static void note(uint32_t op, const char *path, const char *other, uint64_t inode, uint64_t offset, const void *data,
                 size_t n) {
    if (log_fd < 0) return;
    struct entry e = {op, path ? (uint32_t)strlen(path) : 0, other ? (uint32_t)strlen(other) : 0, (uint32_t)n,
                      inode, offset, count};
    put(&e, sizeof e);
    if (e.path_len) put(path, e.path_len);
    if (e.other_len) put(other, e.other_len);
    if (n) put(data, n);
}

/* Between two steps of the history. */
void fault_mark(long step) {
    pthread_mutex_lock(&lock);
    note(OP_MARK, NULL, NULL, 0, (uint64_t)step, NULL, 0);
    pthread_mutex_unlock(&lock);
}

/* The path of a descriptor below the directory, or NULL for one that is not ours. */
static const char *of_fd(int fd, char *buf) {
    char link[64];
    if (!root_len || fd < 0 || fd == log_fd) return NULL;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, buf, 4095);
    if (n <= 0) return NULL;
    buf[n] = 0;
    if (strncmp(buf, root, root_len) || (buf[root_len] != '/' && buf[root_len])) return NULL;
    return buf[root_len] ? buf + root_len + 1 : "";
}

static const char *of_path(int dir, const char *path, char *buf) {
    if (!root_len) return NULL;
    if (path[0] == '/') {
        if (strncmp(path, root, root_len) || (path[root_len] != '/' && path[root_len])) return NULL;
        snprintf(buf, 4096, "%s", path[root_len] ? path + root_len + 1 : "");
        return buf;
    }
    if (dir == AT_FDCWD) return NULL;
    char base[4096];
    const char *in = of_fd(dir, base);
    if (!in) return NULL;
    snprintf(buf, 4096, "%s%s%s", in, *in ? "/" : "", path);
    return buf;
}

static uint64_t inode_of(int fd) {
    struct stat st;
    return fstat(fd, &st) ? 0 : (uint64_t)st.st_ino;
}

/* Decide about the next call, with the lock held. Nonzero: fail with errno set. *half: write only half of it. */
static int decide(int writes, int *half) {
    const long number = count++;
    if (half) *half = 0;
    if (mode == FULL && number > armed && armed >= 0 && writes) {
        errno = ENOSPC;
        return 1;
    }
    if (number != armed || mode == NONE) return 0;
    if (mode == STOP) {
        kill(getpid(), SIGKILL);
        for (;;) pause();
    }
    if (mode == SHORT || mode == FULL) {
        if (half && writes) *half = 1;
        return 0;
    }
    errno = error_number;
    return 1;
}

static ssize_t write_at(int fd, const struct iovec *iov, int n, off_t offset, int at_end) {
    char buf[4096];
    const char *path = of_fd(fd, buf);
    size_t total = 0;
    for (int i = 0; i < n; i++) total += iov[i].iov_len;
    if (!path) {
        return at_end ? syscall(SYS_writev, fd, iov, n) : syscall(SYS_pwritev, fd, iov, n, (long)offset, 0L);
    }
    pthread_mutex_lock(&lock);
    int half = 0;
    ssize_t done = -1;
    if (!decide(1, &half)) {
        char *flat = (char *)malloc(total + 1);
        size_t at = 0;
        for (int i = 0; i < n; i++) {
            memcpy(flat + at, iov[i].iov_base, iov[i].iov_len);
            at += iov[i].iov_len;
        }
        const size_t want = half && total > 1 ? total / 2 : total;
        if (at_end) {
            struct stat st;
            offset = (fcntl(fd, F_GETFL) & O_APPEND) && !fstat(fd, &st) ? st.st_size : lseek(fd, 0, SEEK_CUR);
            done = syscall(SYS_write, fd, flat, want);
        } else {
            done = syscall(SYS_pwrite64, fd, flat, want, (long)offset);
        }
        if (done > 0) note(OP_WRITE, path, NULL, inode_of(fd), (uint64_t)offset, flat, (size_t)done);
        free(flat);
    }
    pthread_mutex_unlock(&lock);
    return done;
}

ssize_t pwrite(int fd, const void *data, size_t n, off_t offset) {
    struct iovec iov = {(void *)(uintptr_t)data, n};
    return write_at(fd, &iov, 1, offset, 0);
}
ssize_t pwrite64(int fd, const void *data, size_t n, off_t offset) { return pwrite(fd, data, n, offset); }
ssize_t pwritev(int fd, const struct iovec *iov, int n, off_t offset) { return write_at(fd, iov, n, offset, 0); }
ssize_t pwritev64(int fd, const struct iovec *iov, int n, off_t offset) { return write_at(fd, iov, n, offset, 0); }
ssize_t writev(int fd, const struct iovec *iov, int n) { return write_at(fd, iov, n, 0, 1); }
ssize_t write(int fd, const void *data, size_t n) {
    struct iovec iov = {(void *)(uintptr_t)data, n};
    return write_at(fd, &iov, 1, 0, 1);
}

int ftruncate(int fd, off_t size) {
    char buf[4096];
    const char *path = of_fd(fd, buf);
    if (!path) return (int)syscall(SYS_ftruncate, fd, size);
    pthread_mutex_lock(&lock);
    int rc = decide(0, NULL) ? -1 : (int)syscall(SYS_ftruncate, fd, size);
    if (!rc) note(OP_TRUNCATE, path, NULL, inode_of(fd), (uint64_t)size, NULL, 0);
    pthread_mutex_unlock(&lock);
    return rc;
}
int ftruncate64(int fd, off_t size) { return ftruncate(fd, size); }

int fallocate(int fd, int how, off_t offset, off_t n) {
    char buf[4096];
    const char *path = of_fd(fd, buf);
    if (!path) return (int)syscall(SYS_fallocate, fd, how, offset, n);
    pthread_mutex_lock(&lock);
    int rc = decide(0, NULL) ? -1 : (int)syscall(SYS_fallocate, fd, how, offset, n);
    if (!rc) note(OP_RESERVE, path, NULL, inode_of(fd), (uint64_t)offset, NULL, 0);
    pthread_mutex_unlock(&lock);
    return rc;
}
int fallocate64(int fd, int how, off_t offset, off_t n) { return fallocate(fd, how, offset, n); }

static int flush(int fd, long number) {
    char buf[4096];
    const char *path = of_fd(fd, buf);
    if (!path) return (int)syscall(number, fd);
    pthread_mutex_lock(&lock);
    int rc = decide(0, NULL) ? -1 : (int)syscall(number, fd);
    if (!rc) note(OP_SYNC, path, NULL, inode_of(fd), 0, NULL, 0);
    pthread_mutex_unlock(&lock);
    return rc;
}
int fsync(int fd) { return flush(fd, SYS_fsync); }
int fdatasync(int fd) { return flush(fd, SYS_fdatasync); }

int sync_file_range(int fd, off_t offset, off_t n, unsigned flags) {
    char buf[4096];
    if (!of_fd(fd, buf)) return (int)syscall(SYS_sync_file_range, fd, offset, n, flags);
    pthread_mutex_lock(&lock);
    int rc = decide(0, NULL) ? -1 : 0; /* promises nothing about the medium */
    pthread_mutex_unlock(&lock);
    return rc;
}

static int two(uint32_t op, int a, const char *from, int b, const char *to, int flags) {
    char one[4096], other[4096];
    const char *left = of_path(a, from, one), *right = of_path(b, to, other);
    if (!left || !right) {
        return op == OP_RENAME ? (int)syscall(SYS_renameat, a, from, b, to) : (int)syscall(SYS_linkat, a, from, b, to, flags);
    }
    pthread_mutex_lock(&lock);
    int rc = -1;
    if (!decide(0, NULL)) {
        rc = op == OP_RENAME ? (int)syscall(SYS_renameat, a, from, b, to) : (int)syscall(SYS_linkat, a, from, b, to, flags);
        if (!rc) note(op, left, right, 0, 0, NULL, 0);
    }
    pthread_mutex_unlock(&lock);
    return rc;
}
int rename(const char *from, const char *to) { return two(OP_RENAME, AT_FDCWD, from, AT_FDCWD, to, 0); }
int renameat(int a, const char *from, int b, const char *to) { return two(OP_RENAME, a, from, b, to, 0); }
int link(const char *from, const char *to) { return two(OP_LINK, AT_FDCWD, from, AT_FDCWD, to, 0); }
int linkat(int a, const char *from, int b, const char *to, int flags) { return two(OP_LINK, a, from, b, to, flags); }

int unlinkat(int dir, const char *path, int flags) {
    char buf[4096];
    const char *name = of_path(dir, path, buf);
    if (!name) return (int)syscall(SYS_unlinkat, dir, path, flags);
    pthread_mutex_lock(&lock);
    int rc = decide(0, NULL) ? -1 : (int)syscall(SYS_unlinkat, dir, path, flags);
    if (!rc) note(OP_UNLINK, name, NULL, 0, 0, NULL, 0);
    pthread_mutex_unlock(&lock);
    return rc;
}
int unlink(const char *path) { return unlinkat(AT_FDCWD, path, 0); }
int rmdir(const char *path) { return unlinkat(AT_FDCWD, path, AT_REMOVEDIR); }

int mkdirat(int dir, const char *path, mode_t how) {
    char buf[4096];
    const char *name = of_path(dir, path, buf);
    if (!name) return (int)syscall(SYS_mkdirat, dir, path, how);
    pthread_mutex_lock(&lock);
    int rc = decide(0, NULL) ? -1 : (int)syscall(SYS_mkdirat, dir, path, how);
    if (!rc) note(OP_MKDIR, name, NULL, 0, 0, NULL, 0);
    pthread_mutex_unlock(&lock);
    return rc;
}
int mkdir(const char *path, mode_t how) { return mkdirat(AT_FDCWD, path, how); }

static int open_at(int dir, const char *path, int flags, mode_t how) {
    char buf[4096];
    const char *name = flags & (O_CREAT | O_TRUNC) ? of_path(dir, path, buf) : NULL;
    if (!name) return (int)syscall(SYS_openat, dir, path, flags, how);
    pthread_mutex_lock(&lock);
    int fd = -1;
    struct stat st;
    if (!decide(0, NULL)) {
        const int was_there = fstatat(dir, path, &st, AT_SYMLINK_NOFOLLOW) == 0;
        fd = (int)syscall(SYS_openat, dir, path, flags, how);
        if (fd >= 0 && !was_there) note(OP_CREATE, name, NULL, inode_of(fd), 0, NULL, 0);
        else if (fd >= 0 && flags & O_TRUNC) note(OP_TRUNCATE, name, NULL, inode_of(fd), 0, NULL, 0);
    }
    pthread_mutex_unlock(&lock);
    return fd;
}

#define OPEN(name, first, dir)                                  \
    int name first {                                            \
        mode_t how = 0;                                         \
        if (flags & (O_CREAT | O_TMPFILE)) {                    \
            va_list rest;                                       \
            va_start(rest, flags);                              \
            how = va_arg(rest, mode_t);                         \
            va_end(rest);                                       \
        }                                                       \
        return open_at(dir, path, flags, how);                  \
    }
OPEN(open, (const char *path, int flags, ...), AT_FDCWD)
OPEN(open64, (const char *path, int flags, ...), AT_FDCWD)
OPEN(openat, (int at, const char *path, int flags, ...), at)
OPEN(openat64, (int at, const char *path, int flags, ...), at)
