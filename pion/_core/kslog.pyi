from typing import Any

from pion._core.keyspace import Keyspace, Value

__all__ = [
    "KIND_END",
    "LargeValue",
    "Loaded",
    "Loader",
    "Snapshot",
    "begin_sync",
    "blob_files",
    "end_sync",
    "resync_log",
    "take_drops",
    "write_blob",
]

KIND_END: int

class Loaded:
    offset: int
    reason: str
    records: int
    durable: int
    complete: bool
    def __init__(self, offset: int, reason: str, records: int, durable: int, complete: bool) -> None: ...

class Loader:
    keyspace: Keyspace
    damaged: dict[tuple[int, bytes], str]
    def __init__(self, keyspace: Keyspace, codec: Any, blob_fd: int = -1) -> None: ...
    def load(self, fd: int, offset: int, end: int, seed: int, *, apply: bool = True) -> Loaded: ...
    def finish(self) -> None: ...

class LargeValue:
    db: int
    key: bytes
    expire: int
    value: Value
    blob: int
    crc: int
    def __init__(self, db: int, key: bytes, expire: int, value: Value, blob: int) -> None: ...
    def write(self, blob_fd: int) -> None: ...
    def record(self, seed: int) -> bytes: ...

def write_blob(blob_fd: int, blob: int, value: Value) -> int: ...

class Snapshot:
    keyspace: Keyspace
    def __init__(self, keyspace: Keyspace, seed: int, codec: Any, blobs: bool = True) -> None: ...
    def slice(self, nbytes: int = ...) -> tuple[bytes, list[LargeValue]] | None: ...
    def closing(self) -> bytes: ...
    def settle(self, large: LargeValue) -> int: ...

def begin_sync(keyspace: Keyspace) -> tuple[int, list[int]]: ...
def end_sync(keyspace: Keyspace, position: int, error: int = 0) -> None: ...
def take_drops(keyspace: Keyspace) -> list[int]: ...
def blob_files(keyspace: Keyspace) -> set[str]: ...
def resync_log(fd: int, offset: int, end: int, seed: int) -> int: ...
