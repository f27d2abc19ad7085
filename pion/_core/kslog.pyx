# cython: language_level=3, freethreading_compatible=False
# cython: boundscheck=False, wraparound=False, initializedcheck=False, cdivision=True
"""Replaying a keyspace log, writing a snapshot in slices, and the bookkeeping of syncs. Files are the caller's.

Replay holds under two rules. No key is ever taken for due: the log says when a key went, and an effect behind its
deadline in today's time was none when it happened. And removing a field never deletes the key, as a snapshot taken
while the log was written may lack fields that were there: `Loader.finish` deletes what is empty in the end.
"""

import os

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.ref cimport Py_INCREF, PyObject
from libc.errno cimport EILSEQ
from libc.stdint cimport uint8_t
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memset

from pion._core.framing cimport (
    FR_BAD_CRC, FR_BAD_FIELD, FR_END, FR_LOG_HEADER, FR_OK, FR_SHORT, FR_ZEROS, fr_get32, fr_get64, fr_log,
    fr_log_decode, fr_pread, fr_put32, fr_put64,
)
from pion._core.framing import pack_log
from pion._core.items cimport pack_items
from pion._core.keyspace cimport *

__all__ = [
    "LargeValue", "Loaded", "Loader", "Snapshot", "blob_files", "drops_waiting", "end_sync", "resync_log", "sync_blobs",
    "sync_file", "synced", "take_drops", "write_blob", "written",
]

cdef enum:
    WINDOW = 4 << 20

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
        damaged: {(db, key): reason} of values whose file is missing or wrong; filled by `finish`.
    """

    def __init__(self, Keyspace keyspace, codec, int blob_fd=-1):
        if keyspace.k.log.fd >= 0:
            raise ValueError("the keyspace has a log attached")
        self.keyspace = keyspace
        self.codec = codec
        self.blob_fd = blob_fd
        self.ghosts = {}
        self.objects = set()
        self.damaged = {}

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
            self.ghosts[(r.db, key[:r.klen])] = None
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
        zeros = kval_new(k.pool, v.len)
        if zeros == NULL:
            raise MemoryError
        memset(zeros.data, 0, zeros.len)
        zeros.flags |= KV_DAMAGED
        ks_replace(k, e, zeros, KS_STRING)
        return 0

    def finish(self) -> None:
        """After the last file: load large values, delete objects without items, count memory.

        Keys whose value file is missing or wrong are deleted and stand in `damaged`.
        """
        cdef ks *k = self.keyspace.k
        cdef kent *e
        k.now_ms = 0
        for db, key in self.ghosts:
            e = self.entry(db, key, len(key))
            if e != NULL and e.type == KS_STRING and e.v.flags & KV_GHOST:
                self.materialize(db, key, e)
        for db, key in list(self.damaged):
            e = self.entry(db, key, len(key))
            if e != NULL and e.type == KS_STRING and e.v.flags & KV_DAMAGED:
                ks_remove(k, e)
            else:
                del self.damaged[(db, key)]
        for db, key in self.objects:
            e = self.entry(db, key, len(key))
            if e == NULL or e.type == KS_STRING:
                continue
            if not <object>e.value:
                ks_remove(k, e)
            else:
                ks_account(k, e, kent_own_bytes(e.klen) + <uint64_t>self.codec.measure(<object>e.value))
        self.ghosts, self.objects = {}, set()
        self.keyspace.drain()
        ks_tick(k)


class LargeValue:
    """A value of a snapshot that has no file of its own yet, or one that the log has gone beyond.

    `write` may run in any thread; `Snapshot.settle` takes the result back to the keyspace's thread.
    """

    __slots__ = ("blob", "crc", "db", "expire", "key", "value")

    def __init__(self, db, key, expire, value, blob):
        self.db = db
        self.key = key
        self.expire = expire
        self.value = value
        self.blob = blob
        self.crc = 0

    def write(self, int blob_fd) -> None:
        """Write the file. Raises OSError."""
        self.crc = write_blob(blob_fd, self.blob, self.value)

    def record(self, uint32_t seed) -> bytes:
        """The snapshot's record of the value; good once `write` is done."""
        where = self.blob.to_bytes(8, "little") + len(self.value).to_bytes(8, "little") + self.crc.to_bytes(4, "little")
        return pack_log(KS_LOG_BLOB, self.db, self.key, where, self.expire, seed)


def write_blob(int blob_fd, uint64_t blob, Value value) -> int:
    """Write a value file without the GIL; returns the checksum for the record that points at it. Raises OSError."""
    cdef uint32_t crc = 0
    cdef int rc
    with nogil:
        rc = ks_blob_write(blob_fd, blob, value.v.data, value.v.len, &crc)
    if rc:
        raise OSError(-rc, os.strerror(-rc))
    return crc


cdef class Snapshot:
    """Serialise a keyspace in slices while it changes.

    The log of the new generation must be attached before the first slice: it holds what changes behind the cursor.

    Args:
        seed: of the snapshot file's generation.
        codec: `dump(object)` gives (kind, items) pairs that build the object.
        blobs: large values get files (`large` of each slice); else they stand in the snapshot.
        renew: write all of these files anew, as the disk may have lost them.
    """

    def __cinit__(self, Keyspace keyspace, uint32_t seed, codec, bint blobs=True, bint renew=False):
        self.renew = renew
        self.keyspace = keyspace
        self.codec = codec
        self.blobs = blobs
        self.large = []
        klog_init(&self.out)
        self.out.seed = seed

    def __dealloc__(self):
        klog_free(&self.out)

    def slice(self, size_t nbytes=1 << 20) -> tuple | None:
        """(bytes to append to the file, large values to write before their records) for about so many bytes; None at
        the end. The bytes may be empty."""
        cdef ks *k = self.keyspace.k
        cdef kent *e
        cdef uint64_t start
        cdef int buckets = 0
        if self.db >= k.databases:
            return None
        ks_tick(k)
        self.large = []
        self.out.len = 0
        while self.db < k.databases and self.out.len < nbytes and len(self.large) < 4 and buckets < 1 << 16:
            start = self.cursor
            e = ks_scan(k, self.db, &self.cursor)
            while e != NULL:
                if e.hash >= start and not kent_due(e, k.now_ms):
                    self.record(e)
                e = e.next
            if self.cursor == 0:
                self.db += 1
            buckets += 1
        if self.out.error:
            raise MemoryError
        return PyBytes_FromStringAndSize(<const char *>self.out.buf, self.out.len), self.large

    cdef int record(self, kent *e) except -1:
        cdef Value value
        cdef uint8_t where[20]
        cdef bytes payload
        if e.type != KS_STRING:
            for kind, items in self.codec.dump(<object>e.value):
                payload = pack_items(kind, items)
                klog_append(&self.out, kind, e.db, e.key, e.klen, PyBytes_AS_STRING(payload),
                            PyBytes_GET_SIZE(payload), NULL, 0)
            if e.expire:
                klog_append(&self.out, KS_LOG_EXPIRE, e.db, e.key, e.klen, b"", 0, NULL, e.expire)
        elif not self.blobs or e.v.len < KS_BLOB_MIN:
            klog_append(&self.out, KS_LOG_SET, e.db, e.key, e.klen, e.v.data, e.v.len, NULL, e.expire)
        elif kval_blob(e.v) and not e.v.flags & KV_DIRTY and not self.renew:
            fr_put64(where, kval_blob(e.v))
            fr_put64(where + 8, e.v.len)
            fr_put32(where + 16, (<kbig *>e.v).crc)
            klog_append(&self.out, KS_LOG_BLOB, e.db, e.key, e.klen, where, 20, NULL, e.expire)
        else:
            value = Value.__new__(Value)
            kval_ref(e.v)
            value.v = e.v
            self.large.append(LargeValue(e.db, e.key[:e.klen], e.expire, value, ks_random_u64(self.keyspace.k)))
            self.pointed += 1
        return 0

    def closing(self) -> bytes:
        """The record that ends a complete snapshot."""
        count = (self.out.records + self.pointed).to_bytes(8, "little")
        return pack_log(KS_LOG_END, 0, b"", count, 0, self.out.seed)

    def settle(self, large) -> int:
        """Note that a large value's file is written (and durable); on the keyspace's thread.

        Returns the file that held an older state of the value and may go once this snapshot has taken the place of
        the generation before it; 0: none. A file whose value is gone meanwhile goes when the log says so on disk.
        """
        cdef ks *k = self.keyspace.k
        cdef bytes key = large.key
        cdef Value value = large.value
        cdef uint64_t old = kval_blob(value.v)
        cdef kent *e = ks_entry(k, large.db, ks_hash(k, PyBytes_AS_STRING(key), PyBytes_GET_SIZE(key)),
                                PyBytes_AS_STRING(key), PyBytes_GET_SIZE(key))
        if e == NULL or e.type != KS_STRING or not e.v.flags & KV_BIG or kval_blob(e.v) != old:
            klog_drop_blob(&k.log, large.blob)
            return 0
        same = e.v == value.v
        ks_blob_attach(e.v, large.blob, large.crc)
        if not same:  # written to meanwhile: the log goes on from what the new file holds
            e.v.flags |= KV_DIRTY
        return old


def written(Keyspace keyspace) -> int:
    """Position behind the last record in the log; any thread may ask. Positions grow over all generations."""
    return klog_written(&keyspace.k.log)


def synced(Keyspace keyspace) -> int:
    """Position up to which everything is on disk."""
    return keyspace.k.log.synced


def sync_file(int fd) -> None:
    """Make the bytes of a file durable, down to the medium where the system can. Raises OSError."""
    cdef int rc
    with nogil:
        rc = ks_fsync(fd)
    if rc:
        raise OSError(-rc, os.strerror(-rc))


def sync_blobs(Keyspace keyspace) -> int:
    """Make the value files durable that were written since the last call, and their names; returns their number.
    Any thread, one at a time. Raises OSError."""
    cdef uint64_t blobs[64]
    cdef klog *g = &keyspace.k.log
    cdef size_t n, total = 0
    cdef int rc
    while True:
        n = klog_take_fresh(g, blobs, 64)
        if n == 0:
            return total
        with nogil:
            rc = ks_blob_sync(g.blob_fd, blobs, n)
        if rc:
            raise OSError(-rc, os.strerror(-rc))
        total += n


def end_sync(Keyspace keyspace, uint64_t position, int error=0) -> None:
    """Everything up to `position` is on disk, or making it so failed with this errno."""
    cdef klog *g = &keyspace.k.log
    if error:
        g.sync_error = error
    elif position > g.synced:
        g.synced = position


def take_drops(Keyspace keyspace) -> list:
    """Some value files to unlink now: the records that dropped them are on disk. Any thread."""
    cdef uint64_t blobs[256]
    cdef size_t n = klog_take_drops(&keyspace.k.log, blobs, 256), i
    return [f"{blobs[i]:016x}" for i in range(n)]


def drops_waiting(Keyspace keyspace) -> int:
    """Value files that wait for their records to be on disk."""
    return keyspace.k.log.ndrops


def blob_files(Keyspace keyspace) -> set:
    """Names of the value files that keys point at."""
    cdef ks *k = keyspace.k
    cdef uint64_t cursor = 0
    cdef kent *e
    names = set()
    for db in range(k.databases):
        while True:
            e = ks_scan(k, db, &cursor)
            while e != NULL:
                if e.type == KS_STRING and kval_blob(e.v):
                    names.add(f"{kval_blob(e.v):016x}")
                e = e.next
            if cursor == 0:
                break
    return names


def resync_log(int fd, uint64_t offset, uint64_t end, uint32_t seed) -> int:
    """Offset of the first whole record at or after `offset`, or -1: tells damage in the middle from a torn tail."""
    cdef int error = 0
    cdef int64_t found
    with nogil:
        found = klog_resync(fd, offset, end, seed, &error)
    if error:
        raise OSError(error, os.strerror(error))
    return found
