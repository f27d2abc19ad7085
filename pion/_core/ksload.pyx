# cython: language_level=3, freethreading_compatible=False
# cython: boundscheck=False, wraparound=False, initializedcheck=False, cdivision=True
"""Replaying snapshots and logs of the keyspace. Files are the caller's.

Replay holds under two rules. No key is ever taken for due: the log says when a key went, and an effect behind its
deadline in today's time was none when it happened. And removing a field never deletes the key, as a snapshot taken
while the log was written may lack fields that were there: `Loader.finish` deletes what is empty in the end.
"""

import os
import stat as _stat

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from cpython.ref cimport Py_INCREF, PyObject
from libc.errno cimport EILSEQ
from libc.stdint cimport uint8_t
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memset

from pion._core.framing cimport (
    FR_BAD_CRC, FR_BAD_FIELD, FR_END, FR_LOG_HEADER, FR_OK, FR_SHORT, FR_ZEROS, fr_get32, fr_get64, fr_log,
    fr_log_decode, fr_pread,
)
from pion._core.keyspace cimport *

__all__ = ["Loaded", "Loader", "file_of", "ghost_of", "place", "read_ghost", "resync_log"]

cdef enum:
    WINDOW = 4 << 20
    BLOB_HEAD = 128

cdef dict _REASONS = {
    FR_END: "end", FR_SHORT: "torn", FR_ZEROS: "zeros", FR_BAD_CRC: "checksum", FR_BAD_FIELD: "garbage",
}
cdef dict _TYPE_OF = {KS_LOG_HSET: KS_HASH, KS_LOG_HDEL: KS_HASH, KS_LOG_ZADD: KS_ZSET, KS_LOG_ZREM: KS_ZSET}


class Loaded:
    """How far a file was read.

    Attributes:
        offset: behind the last whole record that counts.
        reason: why reading stopped there: "end", "torn", "zeros", "checksum", "garbage", "group" (a group of records
            is not whole), "kind" (a record of a newer version) or "database" (of a database there is not).
        records: whole records read.
        durable: the file was on disk up to there when it was written last, as far as it says so.
        complete: a snapshot's closing record was read, and the count in it is right.
    """

    __slots__ = ("complete", "durable", "offset", "reason", "records")

    def __init__(self, offset, reason, records, durable, complete):
        self.offset = offset
        self.reason = reason
        self.records = records
        self.durable = durable
        self.complete = complete


cdef class _Window:
    """A sliding view of a file."""

    def __cinit__(self, int fd, uint64_t end):
        self.fd = fd
        self.end = end
        self.room = WINDOW
        self.data = <uint8_t *>malloc(self.room)
        if self.data == NULL:
            raise MemoryError

    def __dealloc__(self):
        free(self.data)

    cdef const uint8_t *at(self, uint64_t offset, size_t *n, size_t want) except NULL:
        """The bytes from `offset` on, at least `want` unless the file ends before; *n gets their number."""
        cdef size_t left, take
        cdef ssize_t got
        cdef uint8_t *grown
        if offset < self.offset or offset + want > self.offset + self.n:
            left = self.end - offset
            if want > left:
                want = left
            if offset < self.offset or offset + want > self.offset + self.n:
                if want > self.room:
                    grown = <uint8_t *>realloc(self.data, want)
                    if grown == NULL:
                        raise MemoryError
                    self.data = grown
                    self.room = want
                take = min(self.room, left)
                with nogil:
                    got = fr_pread(self.fd, self.data, take, offset)
                if got < 0:
                    raise OSError("the log could not be read")
                self.offset, self.n = offset, got
        n[0] = self.n - (offset - self.offset)
        return self.data + (offset - self.offset)

    cdef int decode(self, uint64_t offset, uint32_t seed, fr_log *r) except -1:
        """The record at `offset`, read whole."""
        cdef size_t n = 0
        cdef const uint8_t *p = self.at(offset, &n, FR_LOG_HEADER)
        cdef int rc = fr_log_decode(p, n, seed, r)
        if rc == FR_SHORT and n >= 4 and offset + 8 + fr_get32(p) <= self.end:
            p = self.at(offset, &n, 8 + <size_t>fr_get32(p))
            rc = fr_log_decode(p, n, seed, r)
        return rc


cdef class Loader:
    """Apply the records of snapshots and logs to a keyspace without a log.

    Args:
        codec: the objects' side: `apply(kind, object | None, payload)` returns the object after an effect,
            `measure(object)` its memory; an empty object is falsy.
        blob_fd: directory of the large values' files, -1 for none.

    Attributes:
        ghosts: (db, key) of large values; after `finish` of those that are there and not loaded yet.
        damaged: {(db, key): reason} of values whose file is missing or of another size; filled by `finish`.
        lost_files: {(db, key): name} of the files of those values.
    """

    def __init__(self, Keyspace keyspace, codec, int blob_fd=-1):
        if keyspace.k.log.fd >= 0:
            raise ValueError("the keyspace has a log attached")
        self.keyspace = keyspace
        self.codec = codec
        self.blob_fd = blob_fd
        self.ghosts = set()
        self.objects = set()
        self.damaged = {}
        self.lost_files = {}

    def load(self, int fd, uint64_t offset, uint64_t end, uint32_t seed, *, bint apply=True) -> Loaded:
        """Read records from `offset` to `end`, or to the first that is not whole; with `apply=False` only look."""
        cdef ks *k = self.keyspace.k
        cdef _Window window = _Window(fd, end)
        cdef fr_log r
        cdef uint64_t records = 0, durable = 0
        cdef bint complete = False
        cdef int rc
        cdef str reason = None
        while reason is None:
            k.now_ms = 0
            rc = window.decode(offset, seed, &r)
            if rc != FR_OK:
                reason = _REASONS[rc]
            elif r.kind == KS_LOG_GROUP:
                if r.vlen != 8 or not self.whole(window, offset + r.total, fr_get64(r.value), seed):
                    reason = "group"
                    break
                window.decode(offset, seed, &r)
            elif r.kind == KS_LOG_SYNC or r.kind == KS_LOG_END:
                if r.vlen != 8:
                    reason = "kind"
                elif r.kind == KS_LOG_END:
                    complete = fr_get64(r.value) == records
                else:
                    durable = max(durable, fr_get64(r.value))
            elif r.db >= k.databases:
                reason = "database"
            elif not (KS_LOG_SET <= r.kind <= KS_LOG_WRITE or KS_LOG_HSET <= r.kind <= KS_LOG_ZREM):
                reason = "kind"
            elif apply:
                self.apply_one(&r)
            if reason is None:
                offset += r.total
                records += 1
        if apply:
            ks_dig(k, 0)
            self.keyspace.drain()
        ks_tick(k)
        return Loaded(offset, reason, records, durable, complete)

    cdef bint whole(self, _Window window, uint64_t offset, uint64_t nbytes, uint32_t seed) except -1:
        cdef fr_log r
        cdef uint64_t stop = offset + nbytes
        if stop > window.end:
            return False
        while offset < stop:
            if window.decode(offset, seed, &r) != FR_OK:
                return False
            offset += r.total
        return offset == stop

    cdef kent *entry(self, int db, const char *key, uint32_t klen):
        return ks_entry(self.keyspace.k, db, ks_hash(self.keyspace.k, key, klen), key, klen)

    cdef int apply_one(self, fr_log *r) except -1:
        cdef ks *k = self.keyspace.k
        cdef const char *key = <const char *>r.key
        cdef kent *e
        cdef kval *v
        cdef int rc = 0
        if r.kind == KS_LOG_SET:
            rc = ks_set_bytes(k, r.db, key, r.klen, r.value, r.vlen, r.expire, 0)
        elif r.kind == KS_LOG_BLOB and r.vlen == 20:
            v = kval_ghost(k.pool, fr_get64(r.value + 8), fr_get64(r.value), fr_get32(r.value + 16))
            if v == NULL:
                raise MemoryError
            rc = ks_set(k, r.db, key, r.klen, v, r.expire, KS_NOLOG)
            self.ghosts.add((r.db, key[:r.klen]))
        elif r.kind == KS_LOG_DEL:
            e = self.entry(r.db, key, r.klen)
            if e != NULL:
                ks_remove(k, e)
        elif r.kind == KS_LOG_EXPIRE:
            e = self.entry(r.db, key, r.klen)
            if e != NULL:
                rc = ks_reserve_due(k, r.expire)
                if rc == 0:
                    ks_schedule(k, e, r.expire)
        elif r.kind == KS_LOG_FLUSHDB:
            ks_flush(k, r.db)
        elif r.kind == KS_LOG_FLUSHALL:
            ks_flush(k, -1)
        elif r.kind == KS_LOG_WRITE and r.vlen >= 8:
            self.write(r.db, key, r.klen, <const char *>r.value, r.vlen)
        elif r.kind >= KS_LOG_HSET:
            self.items(r.kind, r.db, key[:r.klen], r.value[:r.vlen])
        else:
            raise ValueError(f"a log record of kind {r.kind} is malformed")
        if rc:
            raise MemoryError
        return 0

    cdef int write(self, int db, const char *key, uint32_t klen, const char *value, uint32_t vlen) except -1:
        cdef ks *k = self.keyspace.k
        cdef kent *e = self.entry(db, key, klen)
        cdef uint64_t length = 0
        if e != NULL and e.type != KS_STRING:
            ks_remove(k, e)
        elif e != NULL and e.v.flags & KV_GHOST:
            self.materialize(db, key[:klen], e)
        if ks_write(k, db, key, klen, fr_get64(<const uint8_t *>value), value + 8, vlen - 8, &length):
            raise MemoryError
        return 0

    cdef int items(self, int kind, int db, bytes key, bytes payload) except -1:
        cdef ks *k = self.keyspace.k
        cdef kent *e = self.entry(db, PyBytes_AS_STRING(key), PyBytes_GET_SIZE(key))
        cdef int type = _TYPE_OF[kind]
        obj = None
        if e != NULL and e.type == type:
            obj = <object>e.value
        changed = self.codec.apply(kind, obj, payload)
        self.objects.add((db, key))
        if changed is obj:
            return 0
        if ks_set_object(k, db, PyBytes_AS_STRING(key), PyBytes_GET_SIZE(key), <PyObject *>changed, type, 0):
            raise MemoryError
        Py_INCREF(changed)
        return 0

    cdef int materialize(self, int db, bytes key, kent *e) except -1:
        """Load a ghost; what cannot be loaded becomes zeros and is noted as damaged."""
        cdef ks *k = self.keyspace.k
        cdef kval *v = e.v
        cdef kval *zeros
        cdef int rc = ks_blob_read(self.blob_fd, v)
        if rc == 0:
            ks_account(k, e, kent_own_bytes(e.klen) + kval_bytes(v))
            return 0
        self.damaged[(db, key)] = "wrong content" if rc == -EILSEQ else os.strerror(-rc)
        self.lost_files[(db, key)] = f"{kval_blob(v):016x}"
        zeros = kval_new(k.pool, v.len)
        if zeros == NULL:
            raise MemoryError
        memset(zeros.data, 0, zeros.len)
        zeros.flags |= KV_DAMAGED
        ks_replace(k, e, zeros, KS_STRING)
        return 0

    def finish(self) -> None:
        """After the last file: look for the files of large values, delete objects without items, count memory.

        The files are read later. Keys whose file is missing or of another size are deleted and stand in `damaged`.
        """
        cdef ks *k = self.keyspace.k
        cdef kent *e
        k.now_ms = 0
        for db, key in list(self.damaged):
            e = self.entry(db, key, len(key))
            if e != NULL and e.type == KS_STRING and e.v.flags & KV_DAMAGED:
                ks_remove(k, e)
            else:  # something else stands there now
                del self.damaged[(db, key)]
        waiting = set()
        for db, key in self.ghosts:
            e = self.entry(db, key, len(key))
            if e == NULL or e.type != KS_STRING or not e.v.flags & KV_GHOST:
                continue
            expected = BLOB_HEAD + <Py_ssize_t>e.v.len
            name = f"{kval_blob(e.v):016x}"
            try:
                info = os.stat(name, dir_fd=self.blob_fd, follow_symlinks=False)
                found = info.st_size if _stat.S_ISREG(info.st_mode) else -1
                # more is no harm: what stands behind is not read
                reason = f"{found} bytes instead of {expected}" if found >= 0 else "no regular file"
            except OSError as error:
                found, reason = -1, error.strerror
            if found >= expected:
                waiting.add((db, key))
            else:
                self.damaged[(db, key)] = reason
                self.lost_files[(db, key)] = name
                ks_remove(k, e)
        for db, key in self.objects:
            e = self.entry(db, key, len(key))
            if e == NULL or e.type == KS_STRING:
                continue
            if not <object>e.value:
                ks_remove(k, e)
            else:
                ks_account(k, e, kent_own_bytes(e.klen) + <uint64_t>self.codec.measure(<object>e.value))
        self.ghosts, self.objects = waiting, set()
        self.keyspace.drain()
        ks_tick(k)


def ghost_of(Keyspace keyspace, int db, bytes key) -> Value | None:
    """A copy of a value that is not loaded yet, for `read_ghost` in any thread; None when it is loaded or gone."""
    cdef kent *e = ks_entry(keyspace.k, db, ks_hash(keyspace.k, PyBytes_AS_STRING(key), PyBytes_GET_SIZE(key)),
                            PyBytes_AS_STRING(key), PyBytes_GET_SIZE(key))
    cdef Value out
    if e == NULL or e.type != KS_STRING or not e.v.flags & KV_GHOST:
        return None
    out = Value.__new__(Value)
    out.v = kval_ghost(keyspace.k.pool, e.v.len, kval_blob(e.v), (<kbig *>e.v).crc)
    if out.v == NULL:
        raise MemoryError
    return out


def file_of(Value value) -> str:
    """The name, in the directory of large values, of the file that a value of `ghost_of` stands in."""
    return f"{kval_blob(value.v):016x}"


def read_ghost(int blob_fd, Value value) -> bool:
    """Read the file of a value; False when that failed for whatever reason (`Keyspace.get` will say why)."""
    cdef int rc
    with nogil:
        rc = ks_blob_read(blob_fd, value.v)
    return rc == 0


def place(Keyspace keyspace, int db, bytes key, Value value) -> bool:
    """Put what `read_ghost` loaded in the place of the ghost, if it is still there."""
    cdef kent *e = ks_entry(keyspace.k, db, ks_hash(keyspace.k, PyBytes_AS_STRING(key), PyBytes_GET_SIZE(key)),
                            PyBytes_AS_STRING(key), PyBytes_GET_SIZE(key))
    if e == NULL or e.type != KS_STRING or not e.v.flags & KV_GHOST or kval_blob(e.v) != kval_blob(value.v):
        return False
    kval_unref(e.v)
    kval_ref(value.v)
    e.v = value.v
    ks_account(keyspace.k, e, kent_own_bytes(e.klen) + kval_bytes(e.v))
    return True


def resync_log(int fd, uint64_t offset, uint64_t end, uint32_t seed) -> int:
    """Offset of the first whole record at or after `offset`, or -1: tells damage in the middle from a torn tail."""
    cdef int error = 0
    cdef int64_t found
    with nogil:
        found = klog_resync(fd, offset, end, seed, &error)
    if error:
        raise OSError(error, os.strerror(error))
    return found
