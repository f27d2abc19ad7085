"""A keyspace on disk with commands of hashes and sorted sets, as the server's are, and what is in it as a dict."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from pion._core.keyspace import BLOB_MIN, Keyspace
from pion.store.keyspace import KeyspaceStore, files
from pion.store.keyspace.zset import ZSet

NOW = 1_700_000_000_000
BIG = BLOB_MIN + 5
State = dict[tuple[int, bytes], tuple[Any, int]]


def open_store(root: Path, now: int = NOW, **options: Any) -> KeyspaceStore:
    keyspace = Keyspace(2)
    keyspace.set_clock(now)
    store = KeyspaceStore(root, keyspace, options.pop("policy", "everysec"), **options)
    store.open()
    return store


def contents(keyspace: Keyspace) -> State:
    """{(db, key): (value, expire)}; sorted sets as ("zset", {member: score})."""
    found: State = {}
    for db in range(keyspace.databases):
        for key in keyspace.keys(db):
            value = keyspace.get(db, key)
            if isinstance(value, ZSet):
                value = ("zset", dict(value.items()))
            found[db, key] = (dict(value) if isinstance(value, dict) else value, keyspace.expire_at(db, key))
    return found


def reread(root: Path, now: int = NOW) -> State:
    """What a start finds in a directory, without touching it."""
    copy = root.with_name(root.name + ".copy")
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(root, copy)
    store = open_store(copy, now)
    found = contents(store.keyspace)
    store.close()
    shutil.rmtree(copy)
    return found


def hset(keyspace: Keyspace, db: int, key: bytes, pairs: list[tuple[bytes, bytes]]) -> None:
    fields = keyspace.get(db, key)
    if not isinstance(fields, dict):
        if fields is not None:
            keyspace.delete(db, key)
        fields = {}
        keyspace.set_object(db, key, fields, b"hash")
    fields.update(pairs)
    keyspace.log(16, db, key, pairs)


def hdel(keyspace: Keyspace, db: int, key: bytes, names: list[bytes]) -> None:
    fields = keyspace.get(db, key)
    if not isinstance(fields, dict):
        return
    gone = [name for name in names if fields.pop(name, None) is not None]
    if not fields:
        keyspace.delete(db, key)
    elif gone:
        keyspace.log(17, db, key, gone)


def zadd(keyspace: Keyspace, db: int, key: bytes, pairs: list[tuple[bytes, float]]) -> None:
    members = keyspace.get(db, key)
    if not isinstance(members, ZSet):
        if members is not None:
            keyspace.delete(db, key)
        members = ZSet()
        keyspace.set_object(db, key, members, b"zset")
    for member, score in pairs:
        members.add(member, score)
    keyspace.log(18, db, key, pairs)


def zrem(keyspace: Keyspace, db: int, key: bytes, names: list[bytes]) -> None:
    members = keyspace.get(db, key)
    if not isinstance(members, ZSet):
        return
    gone = [name for name in names if members.remove(name)]
    if not len(members):
        keyspace.delete(db, key)
    elif gone:
        keyspace.log(19, db, key, gone)


def put(store: KeyspaceStore, *keys: str, value: bytes = b"v" * 50) -> list[int]:
    """Set keys one batch each; returns the length of the log before each and after the last."""
    sizes = []
    for key in keys:
        sizes.append(store.keyspace.log_bytes)
        store.keyspace.set(0, key.encode(), value + key.encode())
        store.keyspace.flush_log()
    return [*sizes, store.keyspace.log_bytes]


def names(store: KeyspaceStore) -> list[str]:
    return sorted(key.decode() for key in store.keyspace.keys(0))


def log_of(root: Path, number: int = 1) -> Path:
    return files.path_of(root, files.LOG, number)


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x10
    path.write_bytes(data)


def blobs(root: Path) -> set[str]:
    return set(os.listdir(root / "blob"))
