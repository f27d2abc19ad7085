"""What a `HybridRetrievalCache` knows of its chunks: taken in, found again, computed anew when they are gone."""

from __future__ import annotations

import hashlib
import time
from typing import Any

import numpy as np

from pion.client import caches
from pion.client.identity import model_identity, prefix_digest
from pion.client.namespace import token_array
from pion.client.packs import Entry, Manifest, Pack, Rows, assembled, feed, plain_cache, rows_of
from pion.client.server_packs import ServerPacks

__all__ = ["Chunks", "chunk_namespace"]


class Chunks:
    """Chunks by id, of one model. Not for several threads at once.

    Args:
        model: an mlx-lm model.
        manifest: where they are listed.
        server: where their K/V is; None: in this process.

    Attributes:
        stub: what packs are computed behind; None until there is one.
        known: what this process took in.
    """

    def __init__(self, model: Any, manifest: Manifest, server: ServerPacks | None) -> None:
        self.model, self.manifest, self.server = model, manifest, server
        self.stub: Pack | None = None
        self.known: dict[str, Pack] = {}
        self.identity = b""
        self.ingest_count = self.hydrate_miss_count = self.reencode_count = 0
        self.encode_ms_total = 0.0

    def begin(self) -> Chunks:
        """Look at the model: its weights may have changed since the last call."""
        self.identity = model_identity(self.model)
        if self.stub is not None and self.stub.digest != self.digest(self.stub.ids):
            self.set_stub(self.stub.ids)
        return self

    def checked(self, token_ids: Any, what: str) -> np.ndarray[Any, Any]:
        """Token ids that this model can be fed.

        Raises:
            ValueError: none, or one that is not in the vocabulary.
        """
        ids = token_array(token_ids)
        if not ids.size:
            raise ValueError(f"{what} has no tokens")
        vocabulary = getattr(getattr(self.model, "args", None), "vocab_size", None)
        if isinstance(vocabulary, int) and ids.max() >= vocabulary:  # mlx would read beyond the embeddings
            raise ValueError(f"token id {ids.max()} is not in the model's vocabulary of {vocabulary}")
        return ids

    def digest(self, ids: np.ndarray[Any, Any]) -> str:
        """What tells these tokens, of this model, from all others."""
        return prefix_digest(self.identity, ids)

    def set_stub(self, ids: np.ndarray[Any, Any]) -> None:
        """Compute the stub, or fetch it; nothing if it is the one that is set."""
        digest = self.digest(ids)
        if self.stub is not None and self.stub.digest == digest:
            return
        if self.server is None:
            started = time.perf_counter()
            cache = caches.prefill(self.model, ids.tolist(), None)
            self.encode_ms_total += (time.perf_counter() - started) * 1e3
        else:
            cache = self.server.fetch(ids, f"stub_{digest[:32]}")[0]
        self.stub = Pack(ids, 0, digest, rows_of(cache, 0, len(ids)))

    # --- taking in -------------------------------------------------------------------------------------------------

    def take_in(self, chunk_id: str, ids: np.ndarray[Any, Any], encoded_at: int) -> Entry:
        """Have the K/V of a chunk, wherever it is kept; an id that stood for something else stands for this now.

        Args:
            ids: u32, those of the stub included.
            encoded_at: how many those are.
        """
        if not isinstance(chunk_id, str):
            raise TypeError(f"a chunk's id is a str, not {type(chunk_id).__name__}")
        digest = self.digest(ids)
        known = self.known.get(chunk_id)
        pack = Pack(ids, encoded_at, digest, None)
        entry = self._entry(chunk_id, pack)
        if known is not None and (known.digest, known.encoded_at) == (digest, encoded_at):
            if self.server is not None and not self.server.has(ids, entry["namespace"]):  # gone meanwhile
                self.server.upload(ids, entry["namespace"])
        else:
            if self.server is None:
                pack = Pack(ids, encoded_at, digest, self._encoded(ids, encoded_at))
            else:
                self.server.upload(ids, entry["namespace"])
            self.known[chunk_id] = pack
            self.ingest_count += 1
        self.manifest.set(chunk_id, entry)
        return dict(entry)

    def _entry(self, chunk_id: str, pack: Pack) -> Entry:
        namespace = _pack_namespace(pack.digest) if pack.encoded_at else chunk_namespace(chunk_id)
        tokens = len(pack.ids) - pack.encoded_at
        backend = "inproc" if self.server is None else "pion"
        entry: Entry = {"namespace": namespace, "tokens": tokens, "backend": backend, "digest": pack.digest}
        entry["content"] = _content(pack)
        return {**entry, "encoded_at": pack.encoded_at} if pack.encoded_at else entry

    def _encoded(self, ids: np.ndarray[Any, Any], encoded_at: int) -> Rows:
        started = time.perf_counter()
        if encoded_at:
            assert self.stub is not None
            cache = assembled(self.model, [(self.stub.rows or [], 0, 0)])
        else:
            cache = plain_cache(self.model)
        feed(self.model, cache, ids[encoded_at:].tolist())
        rows = rows_of(cache, encoded_at, len(ids))
        self.encode_ms_total += (time.perf_counter() - started) * 1e3
        return rows

    # --- handing out -----------------------------------------------------------------------------------------------

    def find(self, chunk_id: str, entry: Entry | None, count: int | None = None) -> Pack:
        """What a chunk is: known here, or told by the server.

        Raises:
            KeyError: neither; counted as a miss if it should have been there.
        """
        pack = self.known.get(chunk_id)
        if pack is not None and entry is not None:
            if _means(entry, pack):
                return self._current(chunk_id, pack)
            del self.known[chunk_id]  # another process ingested something else: the last one counts
            if self.server is None:
                raise KeyError(f"{chunk_id!r} was ingested with other tokens by another process: ingest it here too")
        if entry is None and count is None:
            raise KeyError(f"{chunk_id!r} is not in the manifest: ingest it, or pass chunk_token_count=")
        if self.server is None:
            raise KeyError(f"{chunk_id!r} is not in this process (backend 'inproc'): ingest it")
        return self._told(self.server, chunk_id, entry or {"tokens": count, "namespace": chunk_namespace(chunk_id)})

    def _told(self, server: ServerPacks, chunk_id: str, entry: Entry) -> Pack:
        """A chunk that another process ingested: its tokens are on the server and are held against their digest."""
        at = entry.get("encoded_at", 0)
        ids = server.tokens(entry["namespace"])
        if not len(ids):
            what = "it is gone"
        elif len(ids) != entry["tokens"] + at:
            what = f"it has {len(ids)} tokens there, not {entry['tokens'] + at}"
        elif entry.get("digest", self.digest(ids)) != self.digest(ids):
            what = "its tokens, or the model, are not those it was ingested with"
        elif "digest" not in entry and not server.has(ids, entry["namespace"]):
            what = "its rows are not there, or another model's"
        elif at and not (self.stub is not None and np.array_equal(ids[:at], self.stub.ids)):
            what = "it was computed behind another stub"
        else:
            pack = Pack(ids, at, self.digest(ids), None)
            if "digest" in entry:
                self.known[chunk_id] = pack
            return pack
        self.hydrate_miss_count += 1
        raise KeyError(f"{chunk_id!r} is not registered on {server.pc.address}: {what}; ingest it again")

    def _current(self, chunk_id: str, pack: Pack) -> Pack:
        """The same for the model and the stub as they are now."""
        ids, at = pack.ids, pack.encoded_at
        if at:
            assert self.stub is not None
            ids, at = np.concatenate([self.stub.ids, ids[at:]]), len(self.stub.ids)
        digest = self.digest(ids)
        if pack.digest == digest:
            return pack
        rows = None
        if self.server is None:
            rows = self._encoded(ids, at)
            self.reencode_count += 1
        pack = self.known[chunk_id] = Pack(ids, at, digest, rows)
        self.manifest.set(chunk_id, self._entry(chunk_id, pack))
        return pack

    def cache(self, pack: Pack, namespace: str) -> list[Any]:
        """What the server holds of a chunk; computed again, and stored, when it is gone."""
        assert self.server is not None
        cache, there = self.server.fetch(pack.ids, namespace)
        self.hydrate_miss_count += not there
        self.reencode_count += not there
        return cache

    def rows(self, pack: Pack) -> Rows:
        """K and V of a pack as it is known now, without the stub's."""
        if pack.rows is not None:
            return pack.rows
        at, end = pack.encoded_at, len(pack.ids)
        cache = self.cache(pack, _pack_namespace(pack.digest))
        return [(layer.keys[:, :, at:end], layer.values[:, :, at:end]) for layer in cache]


def chunk_namespace(chunk_id: str) -> str:
    """Where a chunk that opens a prompt is on the server; packs are found by their digest."""
    return "chunk_" + hashlib.sha256(chunk_id.encode("utf-8", "surrogatepass")).hexdigest()[:24]


def _content(pack: Pack) -> str:
    return hashlib.sha256(pack.ids[pack.encoded_at :].astype("<u4").tobytes()).hexdigest()


def _means(entry: Entry, pack: Pack) -> bool:
    """Whether what the manifest says of an id is this pack, whatever stub and model it was listed with."""
    if ("encoded_at" in entry) != bool(pack.encoded_at) or entry["tokens"] != len(pack.ids) - pack.encoded_at:
        return False
    if "content" in entry:
        return bool(entry["content"] == _content(pack))
    return bool(entry.get("digest", pack.digest) == pack.digest)


def _pack_namespace(digest: str) -> str:
    return "pack_" + digest[:32]
