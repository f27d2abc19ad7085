"""The ordinary keyspace on disk: log, snapshots, replay; and the objects in it."""

from pion.store.keyspace.replay import Recovery
from pion.store.keyspace.store import KeyspaceStore

__all__ = ["KeyspaceStore", "Recovery"]
