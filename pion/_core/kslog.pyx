# cython: language_level=3, freethreading_compatible=False
# cython: boundscheck=False, wraparound=False, initializedcheck=False, cdivision=True
"""Writing snapshots of the keyspace in slices, and the bookkeeping of what is on disk. Files are the caller's."""

import os

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport uint8_t

from pion._core.framing cimport fr_put32, fr_put64
from pion._core.items cimport pack_items
from pion._core.keyspace cimport *

from pion._core.framing import pack_log

__all__ = [
    "LargeValue", "Snapshot", "blob_files", "drops_waiting", "end_sync", "sync_blobs", "sync_file", "synced",
    "take_drops", "write_blob", "written",
]


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
        rc = ks_blob_write(blob_fd, blob, value.v.data, value.v.len, &crc, 0)
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
        renew: write these files anew that were written since the start, as the disk may have lost them.
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
        elif e.v.flags & KV_GHOST or (kval_blob(e.v) and not e.v.flags & KV_DIRTY and not self.renew):
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
