# cython: language_level=3, freethreading_compatible=False
# cython: boundscheck=False, wraparound=False, initializedcheck=False, cdivision=True
"""The ordinary keyspace (strings, hashes, sorted sets) as Python sees it; keyspace.h does the work.

One thread owns a Keyspace. Changes are appended to the log, if one is attached, by the functions that make them;
nothing is in the file before `flush_log` returned.
"""

import logging
import os

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_FillInfo, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from cpython.ref cimport Py_DECREF, Py_INCREF, PyObject
from libc.errno cimport EILSEQ, ENOENT, ENOMEM
from libc.stdlib cimport free

from pion._core.items cimport pack_items

from pion.errors import INCR_OVERFLOW, NOT_INTEGER, CommandError, StorageError, WrongTypeError

log = logging.getLogger("pion.keyspace")

__all__ = ["BLOB_MIN", "Keyspace", "Value", "glob_match"]

BLOB_MIN = KS_BLOB_MIN

cdef extern from "glob.h" nogil:
    bint c_glob_match "glob_match"(const uint8_t *pattern, size_t n, const uint8_t *text, size_t length)

cdef dict _NAMES = {KS_STRING: b"string", KS_HASH: b"hash", KS_ZSET: b"zset"}
cdef dict _TYPES = {b"string": KS_STRING, b"hash": KS_HASH, b"zset": KS_ZSET}
cdef dict _EVICTIONS = {
    "noeviction": KS_NOEVICTION, "allkeys-lru": KS_ALLKEYS_LRU, "volatile-lru": KS_VOLATILE_LRU,
    "volatile-ttl": KS_VOLATILE_TTL,
}
cdef dict _POLICIES = {"no": KS_SYNC_NO, "everysec": KS_SYNC_EVERYSEC, "always": KS_SYNC_ALWAYS}
cdef enum:
    CURSOR_SHIFT = 16  # cursors are the upper 48 bits of a hash: exact in every client's number type


def glob_match(bytes pattern, bytes text) -> bool:
    """Whether a whole text matches a glob pattern, by the rules of KEYS and SCAN MATCH."""
    return c_glob_match(
        <const uint8_t *>PyBytes_AS_STRING(pattern), PyBytes_GET_SIZE(pattern),
        <const uint8_t *>PyBytes_AS_STRING(text), PyBytes_GET_SIZE(text),
    )


cdef class Value:
    """A string value, pinned: a read-only buffer of bytes that never change while it lives."""

    def __init__(self):
        raise TypeError("a Value comes from Keyspace.pin")

    def __dealloc__(self):
        if self.v != NULL:
            kval_unref(self.v)

    def __len__(self) -> int:
        return self.v.len

    def __getbuffer__(self, Py_buffer *view, int flags):
        PyBuffer_FillInfo(view, self, self.v.data, self.v.len, 1, flags)

    def __bytes__(self) -> bytes:
        return self.v.data[:self.v.len]


cdef int _raise(int rc) except -1:
    """The Python error of a negative or positive result of keyspace.h."""
    if rc == KS_WRONGTYPE:
        raise WrongTypeError()
    if rc == KS_NOT_INTEGER:
        raise CommandError(NOT_INTEGER)
    if rc == KS_OVERFLOW:
        raise CommandError(INCR_OVERFLOW)
    if rc == -ENOMEM:
        raise MemoryError
    if rc < 0:
        raise OSError(-rc, os.strerror(-rc))
    return 0


cdef class Keyspace:
    """Databases of keys with an optional time to live.

    Beside the keys there are tables which C code looks up by name. They alone may be used from any thread; they are
    never logged, and FLUSHALL leaves them alone.

    Args:
        databases: how many (1..63).
        seed: fixes the hash, for tests; random otherwise.

    Errors: a write raises OSError when a large value cannot be written to its file, and MemoryError; then nothing
    has changed. Whether writers should be refused at all is `refuses`, and theirs to ask.
    """

    def __cinit__(self, int databases=16, seed=None):
        if not 1 <= databases < KS_DATABASES_MAX:
            raise ValueError(f"databases must be 1..{KS_DATABASES_MAX - 1}")
        raw = os.urandom(16) if seed is None else int(seed).to_bytes(16, "little")
        self.k = ks_new(databases, int.from_bytes(raw[:8], "little"), int.from_bytes(raw[8:], "little"))
        if self.k == NULL:
            raise MemoryError

    def __dealloc__(self):
        if self.k != NULL:
            ks_clear(self.k)
            self.drain()
            free(self.k.dead)
            free(self.k)

    cdef inline void drain(self):
        """Release the objects that C code has replaced."""
        cdef PyObject *gone
        while self.k.ndead:  # a destructor may come back here: take one at a time
            self.k.ndead -= 1
            gone = <PyObject *>self.k.dead[self.k.ndead]
            Py_DECREF(<object>gone)

    cdef int check(self, int db) except -1:
        if not 0 <= db < self.k.databases:
            raise IndexError(f"no database {db}")
        return 0

    cdef kent *find(self, int db, bytes key) except? NULL:
        self.check(db)
        return ks_find(self.k, db, PyBytes_AS_STRING(key), PyBytes_GET_SIZE(key), ks_tick(self.k))

    cdef kent *loaded(self, kent *e) except? NULL:
        """The entry with its bytes in memory. NULL when its file is lost: then the key is gone, which is logged."""
        cdef int rc
        if e == NULL or e.type != KS_STRING or not e.v.flags & KV_GHOST:
            return e
        rc = ks_blob_read(self.k.log.blob_fd, e.v)
        if rc == 0:
            ks_account(self.k, e, kent_own_bytes(e.klen) + kval_bytes(e.v))
            return e
        if rc == -ENOMEM:
            raise MemoryError
        if rc != -ENOENT and rc != -EILSEQ:  # it may be readable again one day
            raise StorageError(f"ERR the file of the value, blob/{kval_blob(e.v):016x}, cannot be read: "
                               f"{os.strerror(-rc)}")
        reason = "wrong content" if rc == -EILSEQ else os.strerror(-rc)
        key = e.key[:e.klen]
        name = f"{kval_blob(e.v):016x}"
        log.error("database %d, key %r: the file of its value, blob/%s, is lost (%s); the key is gone", e.db, key, name,
                  reason)
        if rc == -EILSEQ:  # for a person to look at
            try:
                os.rename(name, f"../blob.{name}.unused", src_dir_fd=self.k.log.blob_fd,
                          dst_dir_fd=self.k.log.blob_fd)
            except OSError as error:
                log.error("blob/%s could not be moved aside: %s", name, error.strerror)
        self.lost += 1
        ks_delete(self.k, e)
        return NULL

    # --- reading --------------------------------------------------------------------------------------------------

    def get(self, int db, bytes key):
        """The value: bytes of a string, the object of another type, None when there is no such key. Counts a hit or
        a miss and notes the use."""
        self.check(db)
        cdef kent *e = ks_read(self.k, db, PyBytes_AS_STRING(key), PyBytes_GET_SIZE(key), ks_tick(self.k))
        self.drain()
        e = self.loaded(e)
        if e == NULL:
            return None
        return e.v.data[:e.v.len] if e.type == KS_STRING else <object>e.value

    def pin(self, int db, bytes key) -> Value | None:
        """The string at a key without a copy; None when there is no such key. Raises WrongTypeError."""
        self.check(db)
        cdef kent *e = ks_read(self.k, db, PyBytes_AS_STRING(key), PyBytes_GET_SIZE(key), ks_tick(self.k))
        cdef Value out
        e = self.loaded(e)
        if e == NULL:
            return None
        if e.type != KS_STRING:
            raise WrongTypeError()
        out = Value.__new__(Value)
        kval_ref(e.v)
        out.v = e.v
        return out

    def type(self, int db, bytes key) -> bytes | None:
        """b"string", b"hash", b"zset" or None."""
        cdef kent *e = self.find(db, key)
        return None if e == NULL else _NAMES[e.type]

    def exists(self, int db, bytes key, bint count=False) -> bool:
        """Whether there is such a key; with `count` as a reader asks, which is a hit or a miss and notes the use."""
        if not count:
            return self.find(db, key) != NULL
        self.check(db)
        return ks_read(self.k, db, PyBytes_AS_STRING(key), PyBytes_GET_SIZE(key), ks_tick(self.k)) != NULL

    def strlen(self, int db, bytes key) -> int:
        """Bytes of a string, 0 when there is no such key. Raises WrongTypeError."""
        cdef kent *e = self.find(db, key)
        if e == NULL:
            return 0
        if e.type != KS_STRING:
            raise WrongTypeError()
        return e.v.len

    def expire_at(self, int db, bytes key) -> int:
        """When the key goes, in ms since 1970; -1 never, -2 there is no such key."""
        cdef kent *e = self.find(db, key)
        if e == NULL:
            return -2
        return e.expire if e.expire else -1

    def memory(self, int db, bytes key) -> int | None:
        """Bytes the key takes in `used_bytes`, None when there is no such key."""
        cdef kent *e = self.find(db, key)
        return None if e == NULL else e.bytes

    def idle_seconds(self, int db, bytes key) -> int | None:
        """Seconds since the last use, None when there is no such key."""
        cdef kent *e = self.find(db, key)
        return None if e == NULL else <uint64_t><uint32_t>(ks_clock(self.k.now_ms) - e.clock) * 64 // 1000

    def touch(self, int db, bytes key) -> bool:
        """Note a use; False when there is no such key."""
        cdef kent *e = self.find(db, key)
        if e == NULL:
            return False
        e.clock = ks_clock(self.k.now_ms)
        return True

    # --- changing -------------------------------------------------------------------------------------------------

    def set(self, int db, bytes key, value, uint64_t expire_ms=0, bint keepttl=False) -> None:
        """Put a string (any buffer, copied). `expire_ms` is absolute; 0, or a plain set, clears an earlier expiry."""
        cdef Py_buffer view
        cdef int rc
        self.check(db)
        PyObject_GetBuffer(value, &view, PyBUF_SIMPLE)
        ks_tick(self.k)
        rc = ks_set_bytes(self.k, db, PyBytes_AS_STRING(key), PyBytes_GET_SIZE(key), view.buf, view.len, expire_ms,
                          KS_KEEPTTL if keepttl else 0)
        PyBuffer_Release(&view)
        self.drain()
        _raise(rc)

    def set_object(self, int db, bytes key, obj, bytes type, uint64_t nbytes=0) -> None:
        """Put a hash or sorted set; `nbytes` is its memory (see also `adjust`). Not logged: `log` says what is in it.
        A live key keeps its expiry."""
        self.check(db)
        ks_tick(self.k)
        cdef kent *e = self.find(db, key)
        if e != NULL and e.type != KS_STRING and <object>e.value is obj:
            ks_account(self.k, e, kent_own_bytes(e.klen) + nbytes)
            return
        cdef int rc = ks_set_object(
            self.k, db, PyBytes_AS_STRING(key), PyBytes_GET_SIZE(key), <PyObject *>obj, _TYPES[type], nbytes
        )
        _raise(rc)
        Py_INCREF(obj)
        self.drain()

    def adjust(self, int db, bytes key, int64_t nbytes) -> None:
        """Correct the memory of an object that was changed in place by so many bytes."""
        cdef kent *e = self.find(db, key)
        if e != NULL:
            ks_account(self.k, e, max(<int64_t>kent_own_bytes(e.klen), <int64_t>e.bytes + nbytes))

    def write(self, int db, bytes key, uint64_t offset, data) -> int:
        """Put bytes at an offset of a string, padded with zeros up to it; returns the new length."""
        cdef Py_buffer view
        cdef uint64_t length = 0
        cdef int rc
        self.loaded(self.find(db, key))
        PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
        rc = ks_write(self.k, db, PyBytes_AS_STRING(key), PyBytes_GET_SIZE(key), offset, view.buf, view.len, &length)
        PyBuffer_Release(&view)
        _raise(rc)
        return length

    def append(self, int db, bytes key, data) -> int:
        """Put bytes behind a string; returns the new length."""
        return self.write(db, key, self.strlen(db, key), data)

    def incr(self, int db, bytes key, int64_t by) -> int:
        """Add to a decimal integer (0 when there is no such key); keeps the expiry."""
        cdef int64_t result = 0
        self.check(db)
        ks_tick(self.k)
        _raise(ks_incr(self.k, db, PyBytes_AS_STRING(key), PyBytes_GET_SIZE(key), by, &result))
        return result

    def delete(self, int db, bytes key) -> bool:
        """True when the key was there."""
        self.check(db)
        ks_tick(self.k)
        cdef bint there = ks_del(self.k, db, PyBytes_AS_STRING(key), PyBytes_GET_SIZE(key))
        self.drain()
        return there

    def set_expire(self, int db, bytes key, uint64_t when_ms) -> bool:
        """Let the key go at an absolute time (one that has come deletes it); False when there is no such key."""
        cdef kent *e = self.find(db, key)
        if e == NULL:
            return False
        if when_ms == 0:
            when_ms = 1
        _raise(ks_expire(self.k, e, when_ms))
        self.drain()
        return True

    def persist(self, int db, bytes key) -> bool:
        """Clear the expiry; True when there was one."""
        cdef kent *e = self.find(db, key)
        if e == NULL or not e.expire:
            return False
        _raise(ks_expire(self.k, e, 0))
        return True

    def rename(self, int db, bytes source, bytes target, target_db=None) -> bool:
        """Move a value with its expiry over whatever is at `target`; False when there is no `source`."""
        cdef int to = db if target_db is None else target_db
        cdef kent *e = self.find(db, source)
        cdef kent *moved
        cdef uint64_t expire, nbytes
        cdef int kind
        self.check(to)
        if e == NULL:
            return False
        if source == target and to == db:
            return True
        expire, nbytes, kind = e.expire, e.bytes - kent_own_bytes(e.klen), e.type
        if ks_reserve_due(self.k, expire):
            raise MemoryError
        if kind == KS_STRING and ks_logs(self.k) and not e.v.flags & KV_GHOST:
            _raise(ks_blob_save(self.k, e.v))
        klog_group_begin(&self.k.log)
        cdef kent *old = self.find(to, target)
        if old != NULL:
            ks_delete(self.k, old)
        moved = ks_insert(
            self.k, to, ks_hash(self.k, PyBytes_AS_STRING(target), PyBytes_GET_SIZE(target)),
            PyBytes_AS_STRING(target), PyBytes_GET_SIZE(target),
        )
        if moved == NULL:
            klog_group_end(&self.k.log)
            raise MemoryError
        moved.value, moved.type, moved.clock = e.value, e.type, e.clock
        e.value, e.type = NULL, KS_NONE
        ks_account(self.k, moved, kent_own_bytes(moved.klen) + nbytes)
        ks_delete(self.k, e)
        ks_schedule(self.k, moved, expire)
        if kind == KS_STRING:
            ks_log_string(self.k, moved)
        elif self.codec is not None:
            for effect, items in self.codec.dump(<object>moved.value):
                self.log(effect, to, target, items)
            if expire and ks_logs(self.k):
                klog_append(&self.k.log, KS_LOG_EXPIRE, to, moved.key, moved.klen, b"", 0, NULL, expire)
        klog_group_end(&self.k.log)
        self.drain()
        return True

    def flush(self, db=None) -> None:
        """Empty one database, or all of them. The memory is given back by later `expire_cycle` calls."""
        if db is not None:
            self.check(db)
        ks_flush(self.k, -1 if db is None else db)

    # --- whole databases ------------------------------------------------------------------------------------------

    def size(self, int db) -> int:
        """Keys in a database, due ones that were not deleted yet included."""
        self.check(db)
        return self.k.db[db].count

    def expires(self, int db) -> int:
        """Keys with a time to live."""
        self.check(db)
        return self.k.db[db].expires

    def random(self, int db) -> bytes | None:
        """Some key, or None."""
        self.check(db)
        ks_tick(self.k)
        cdef kent *e = ks_random(self.k, db)
        return None if e == NULL else e.key[:e.klen]

    def scan(self, int db, uint64_t cursor, Py_ssize_t count=10, bytes match=None, bytes type=None) -> tuple:
        """One step of SCAN: (next cursor, keys). Start with 0, stop when 0 comes back.

        A key that is there during the whole scan is returned exactly once, one that comes or goes at most once.
        `count` is the number of keys looked at; `match` and `type` filter them afterwards.
        """
        self.check(db)
        cdef uint64_t at = cursor << CURSOR_SHIFT, start
        cdef uint64_t now_ms = ks_tick(self.k)
        cdef Py_ssize_t seen = 0, buckets = 0
        cdef int wanted = KS_NONE if type is None else _TYPES.get(type, -1)
        cdef kent *e
        found = []
        while True:
            start = at
            e = ks_scan(self.k, db, &at)
            while e != NULL:
                if e.hash >= start:
                    seen += 1
                    if (not kent_due(e, now_ms) and (wanted == KS_NONE or wanted == e.type) and (
                        match is None or c_glob_match(
                            <const uint8_t *>PyBytes_AS_STRING(match), PyBytes_GET_SIZE(match),
                            <const uint8_t *>e.key, e.klen,
                        )
                    )):
                        found.append(e.key[:e.klen])
                e = e.next
            buckets += 1
            if at == 0 or seen >= count or buckets >= 10 * count:
                return at >> CURSOR_SHIFT, found

    def keys(self, int db):
        """Iterate over the keys; the keyspace may change meanwhile (see `scan`)."""
        cursor = 0
        while True:
            cursor, found = self.scan(db, cursor, 500)
            yield from found
            if not cursor:
                return

    def expire_cycle(self, uint64_t budget_us=1000) -> int:
        """Delete due keys, give back flushed memory, go on resizing, for about so long. Returns the keys deleted."""
        ks_tick(self.k)
        cdef uint64_t n
        with nogil:
            n = ks_cycle(self.k, budget_us)
        self.drain()
        return n

    def set_clock(self, now_ms) -> None:
        """Fix the time (ms since 1970), for tests; None follows the system clock."""
        self.k.fixed_now = 0 if now_ms is None else now_ms
        ks_tick(self.k)

    def reset_stats(self) -> None:
        """Set hits, misses, expired and evicted to 0."""
        self.k.hits = self.k.misses = self.k.expired = self.k.evicted = 0

    # --- bound of the memory --------------------------------------------------------------------------------------

    def bound(self, uint64_t nbytes, str policy="noeviction") -> None:
        """Let `used_bytes` be at most so many (0: no bound) for whoever calls `make_room` before each write.

        Args:
            policy: what goes when there is no room: "noeviction", "allkeys-lru", "volatile-lru" or "volatile-ttl".
        """
        self.k.policy = _EVICTIONS[policy]
        self.k.maxmemory = nbytes
        self.k.ncandidates = 0

    def make_room(self) -> bool:
        """Evict until the keyspace is within its bound; False when it is not and nothing may go."""
        cdef bint done
        ks_tick(self.k)
        with nogil:
            done = ks_make_room(self.k)
        self.drain()
        return done

    @property
    def over(self) -> bool:
        """More is held than the bound allows."""
        return ks_over(self.k)

    @property
    def evicted(self) -> int:
        """Keys that went for the bound."""
        return self.k.evicted

    # --- tables ---------------------------------------------------------------------------------------------------

    def table_get(self, bytes name) -> bytes | None:
        """A table, None when there is none of that name. Any thread."""
        cdef kval *v = ks_table_get(self.k, PyBytes_AS_STRING(name), PyBytes_GET_SIZE(name), 0)
        if v == NULL:
            return None
        try:
            return v.data[:v.len]
        finally:
            kval_unref(v)

    def table_put(self, bytes name, data, uint64_t expire_ms=0) -> None:
        """Put a table (any buffer, copied), to be probed until a time in ms since 1970, 0: for ever. Any thread."""
        cdef Py_buffer view
        PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
        cdef int rc = ks_table_put(
            self.k, PyBytes_AS_STRING(name), PyBytes_GET_SIZE(name), view.buf, view.len, expire_ms
        )
        PyBuffer_Release(&view)
        _raise(rc)

    def table_drop(self, bytes name) -> bool:
        """Forget a table; True when it was there. Any thread."""
        return ks_table_drop(self.k, PyBytes_AS_STRING(name), PyBytes_GET_SIZE(name))

    def table_used(self, bytes name) -> int:
        """The number (`next_use`) of a table's last probe by a client, 0: there is none of that name. Any thread."""
        return ks_table_used(self.k, PyBytes_AS_STRING(name), PyBytes_GET_SIZE(name))

    def next_use(self, uint64_t least=0) -> int:
        """A number above all that were given out, and above `least`. Calls from several threads are the caller's to
        order; probes of tables may come between."""
        if self.k.uses < least:
            self.k.uses = least
        return ks_next_use(self.k)

    # --- log ------------------------------------------------------------------------------------------------------

    def log(self, uint8_t kind, int db, bytes key, items) -> None:
        """Record an effect on a hash or sorted set.

        Args:
            kind: KS_LOG_HSET 16, (field, value) pairs; HDEL 17, fields; ZADD 18, (member, score) pairs; ZREM 19,
                members.
            items: such a sequence, or its packed form.
        """
        cdef bytes payload
        self.check(db)
        self.k.dirty += 1
        if not ks_logs(self.k):
            return
        payload = items if type(items) is bytes else pack_items(kind, items)
        klog_append(&self.k.log, kind, db, PyBytes_AS_STRING(key), PyBytes_GET_SIZE(key),
                    PyBytes_AS_STRING(payload), PyBytes_GET_SIZE(payload), NULL, 0)

    def attach_log(self, int fd, uint64_t offset, uint32_t seed, *, str policy="everysec", int blob_fd=-1,
                   codec=None, int error=0) -> None:
        """Log every further change to an open file from `offset` on. The descriptors stay the caller's.

        Args:
            seed: of the file's generation (`framing.seed_of`).
            policy: "no", "everysec" or "always" (`flush_log` makes durable what it writes).
            blob_fd: directory for the files of large values; -1 keeps them in the log.
            codec: turns objects into effects (`dump`), needed by `rename`.
            error: refuse writers for this errno until `accept`. Pending records are then dropped: a snapshot follows.
        """
        cdef klog *g = &self.k.log
        cdef uint64_t position = klog_position(g)
        if error:
            klog_clear(g)
            position = klog_position(g)
        elif klog_pending(g):
            raise ValueError("the log attached before has unwritten records")
        g.policy = _POLICIES[policy]
        g.base = position - offset if position > offset else 0  # positions go on from file to file
        g.size = offset
        g.fd, g.blob_fd, g.seed = fd, blob_fd, seed
        g.error, g.lost = error, error
        if error:
            g.sync_error = 0
        g.records = 0
        g.marked = klog_position(g)
        if codec is not None:
            self.codec = codec

    def accept(self) -> None:
        """After `attach_log(error=...)`: a complete snapshot stands beside the new log, writers are welcome again."""
        self.k.log.error = self.k.log.lost = 0

    def detach_log(self) -> None:
        """Stop logging; what is pending is forgotten."""
        klog_free(&self.k.log)

    def flush_log(self) -> None:
        """Write what is pending, in one call to the system. Raises OSError; then `refuses` stays set."""
        cdef int rc
        with nogil:
            rc = ks_log_flush(self.k)
        _raise(rc)

    def retry_log(self) -> bool:
        """Try a failed write again; True when the log is well."""
        cdef int rc
        with nogil:
            rc = klog_retry(&self.k.log)
        return rc == 0

    def group(self, bint begin) -> None:
        """Begin or end a group of changes that a restart sees together or not at all."""
        if begin:
            klog_group_begin(&self.k.log)
        else:
            klog_group_end(&self.k.log)

    @property
    def log_policy(self) -> str:
        return next(name for name, value in _POLICIES.items() if value == self.k.log.policy)

    @log_policy.setter
    def log_policy(self, str policy):
        self.k.log.policy = _POLICIES[policy]

    @property
    def refuses(self) -> int:
        """errno of the failure for which writers are to be refused, 0: none."""
        return ks_refuses(self.k)

    @property
    def log_error(self) -> int:
        """errno of a write of the log that failed, 0: none."""
        return self.k.log.error

    @property
    def sync_error(self) -> int:
        """errno of a sync of the log that failed, 0: none."""
        return self.k.log.sync_error

    @property
    def log_bytes(self) -> int:
        """Bytes in the log file."""
        return self.k.log.size

    @property
    def log_pending(self) -> int:
        """Bytes that wait for `flush_log`."""
        return klog_pending(&self.k.log)

    @property
    def log_records(self) -> int:
        """Records since the log was attached."""
        return self.k.log.records

    # --- numbers --------------------------------------------------------------------------------------------------

    @property
    def databases(self) -> int:
        return self.k.databases

    @property
    def now_ms(self) -> int:
        return ks_tick(self.k)

    @property
    def used_bytes(self) -> int:
        """Memory of keys and values."""
        return self.k.used_bytes

    @property
    def table_bytes(self) -> int:
        """Memory of the tables and the expiry heap themselves."""
        return ks_table_bytes(self.k)

    @property
    def cached_bytes(self) -> int:
        """Buffers kept for the next large value."""
        return self.k.pool.cached

    @property
    def hits(self) -> int:
        return self.k.hits

    @property
    def misses(self) -> int:
        return self.k.misses

    @property
    def expired(self) -> int:
        return self.k.expired

    @property
    def lost_values(self) -> int:
        """Keys that went because the file of their value was missing or wrong."""
        return self.lost

    @property
    def dirty(self) -> int:
        """Changes since the start."""
        return self.k.dirty
