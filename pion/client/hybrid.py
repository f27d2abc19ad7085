"""`HybridRetrievalCache`: the K/V of retrieved chunks, put together for each question instead of computed.

    hr = HybridRetrievalCache(model)
    hr.set_shared_stub(stub_ids)                                       # "Answer from the passages:", with <bos>
    hr.ingest_pack("eiffel", eiffel_ids)                               # once per passage
    cache, rest = hr.prepare_multi(["louvre", "eiffel"], question_ids) # per question, in any order
    text = generate(model, tok, prompt=rest, prompt_cache=cache)

A pack is computed behind the stub and moved to where it stands in the prompt, which is exact for its own positions.
What a pack does not know is the packs before it: the answers are those of a model that reads each passage alone.
`self_check` measures how much that costs. Without a stub, `ingest` and `prepare` do the same for one chunk that opens
the prompt, where nothing is moved and nothing is lost.
"""

from __future__ import annotations

import os
import ssl as tls
import threading
import time
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from pion.client import agreement, caches
from pion.client.agreement import Agreement, Sample
from pion.client.chunks import Chunks, chunk_namespace
from pion.client.namespace import token_array
from pion.client.packs import Entry, Manifest, Pack, assembled, plain_cache
from pion.client.prompt_cache import PionPromptCache
from pion.client.rotate import Mover, Rope, verified_ropes
from pion.client.server_packs import ServerPacks
from pion.limits import DEFAULT_PORT

__all__ = ["HybridRetrievalCache"]


class HybridRetrievalCache:
    """Prompt caches of chunks that were computed before.

    Args:
        model: an mlx-lm model whose layers all have a plain ``KVCache``. For packs, keys must be movable, see
            `pion.client.rotate`.
        backend: ``"inproc"``: K/V stays in this process, in the model's own words. ``"pion"``: on a server.
        host, port, url, username, password, ssl, timeout: the server, as for `PionPromptCache`.
        vquant: the stored format of backend ``"pion"``.
        manifest_path: a JSON file that lists the chunks, for other processes and the next start; see
            `pion.client.packs`. None: a list in memory.

    Raises:
        ValueError: an argument is not offered, or the file is no manifest.
        ImportError: mlx or mlx-lm is missing.
        PionMlxCompatError: the model keeps its state in other classes; the text names them.

    What a chunk holds is told by a digest of its tokens and of the model, at every use: the same id with other tokens
    is computed anew, and so is everything after a change of the stub or of the model's weights. Every cache that is
    handed out is the caller's alone. The object may be shared between threads; it works for one at a time.
    """

    def __init__(
        self,
        model: Any,
        backend: str = "inproc",
        host: str = "127.0.0.1",
        port: int = DEFAULT_PORT,
        vquant: str = "fp16",
        manifest_path: str | os.PathLike[str] | None = None,
        *,
        url: str | None = None,
        username: str | None = None,
        password: str | None = None,
        ssl: bool | tls.SSLContext | None = None,
        timeout: float | None = None,
    ) -> None:
        if backend not in ("inproc", "pion"):
            raise ValueError(f"backend must be 'inproc' or 'pion', got {backend!r}")
        plain_cache(model)
        self._manifest = Manifest(manifest_path)
        self._server: ServerPacks | None = None
        if backend == "pion":
            pc = PionPromptCache(
                model, vquant, host, port, url=url, username=username, password=password, ssl=ssl, timeout=timeout,
                on_mismatch="recompute",
            )  # fmt: skip
            self._server = ServerPacks(pc)
        else:
            caches.inspect_model(model)
        self.model = model
        self.backend: Literal["inproc", "pion"] = "pion" if self._server else "inproc"
        self.hydrate_count, self.prepare_ms_total = 0, 0.0
        self._chunks = Chunks(model, self._manifest, self._server)
        self._ropes: list[Rope | None] | None = None
        self._refused: str | None = None
        self._lock = threading.RLock()

    # --- one chunk that opens the prompt --------------------------------------------------------------------------

    def ingest(self, chunk_id: str, chunk_token_ids: Any) -> Entry:
        """Compute the K/V of a chunk, unless these very tokens are known already.

        Args:
            chunk_id: any text; an id that holds other tokens gets these.
            chunk_token_ids: at least one.

        Returns:
            The entry of the manifest.
        """
        with self._lock:
            chunks = self._chunks.begin()
            return chunks.take_in(chunk_id, chunks.checked(chunk_token_ids, "the chunk"), 0)

    def prepare(
        self, chunk_id: str, suffix_token_ids: Any = (), chunk_token_count: int | None = None
    ) -> tuple[list[Any], list[int]]:
        """A cache that holds a chunk, and what is still to be fed to the model.

        Args:
            chunk_id: an ingested chunk.
            suffix_token_ids: the rest of the prompt. Nothing, or None: the chunk's last token is taken out of the
                cache and returned instead, since a model needs a token to go on from.
            chunk_token_count: how many tokens the chunk has, for a process that has no manifest (backend ``"pion"``).

        Raises:
            KeyError: the chunk is not known, not in this process (``"inproc"``), or not on the server and its tokens
                are not known either. In a process that ingested it, it is computed again, unless another process has
                ingested other tokens under its id since: those count.
            ValueError: the manifest is damaged; the text names it. So in every method.
        """
        started = time.perf_counter()
        with self._lock:
            suffix = self._suffix(suffix_token_ids)
            entry = self._manifest.get(chunk_id)
            if entry is not None and "encoded_at" in entry:
                raise KeyError(
                    f"{chunk_id!r} is a pack, which stands behind a stub: prepare_multi([{chunk_id!r}], ...)"
                )
            pack = self._chunks.begin().find(chunk_id, entry, chunk_token_count)
            if pack.rows is not None:
                cache = assembled(self.model, [(pack.rows, 0, 0)])
            else:
                cache = self._chunks.cache(pack, chunk_namespace(chunk_id))
            return self._handed_out(cache, suffix, pack.ids, started)

    # --- several ---------------------------------------------------------------------------------------------------

    def set_shared_stub(self, stub_token_ids: Any) -> dict[str, int]:
        """Compute the instruction that opens every composition; it carries the ``<bos>``, packs do not.

        Packs that were computed behind another stub are computed again when they are used next.

        Returns:
            ``{"stub_tokens": n}``.

        Raises:
            PionMlxCompatError: keys of this model cannot be moved; the text says why.
        """
        with self._lock:
            self._movable()
            chunks = self._chunks.begin()
            ids = chunks.checked(stub_token_ids, "the stub")
            chunks.set_stub(ids)
            return {"stub_tokens": len(ids)}

    def ingest_pack(self, chunk_id: str, chunk_token_ids: Any) -> Entry:
        """Compute the K/V of a chunk behind the stub, unless that was done.

        Args:
            chunk_id: any text; an id that holds other tokens gets these.
            chunk_token_ids: at least one, encoded with ``add_special_tokens=False``.

        Returns:
            The entry of the manifest; ``encoded_at`` is the length of the stub.

        Raises:
            RuntimeError: there is no stub.
        """
        with self._lock:
            stub = self._shared_stub("ingest_pack")
            ids = self._chunks.checked(chunk_token_ids, "the chunk")
            return self._chunks.take_in(chunk_id, np.concatenate([stub.ids, ids]), len(stub.ids))

    def prepare_multi(
        self, chunk_ids: Sequence[str], suffix_token_ids: Any = (), max_packs: int = 8, allow_fine_grain: bool = False
    ) -> tuple[list[Any], list[int]]:
        """A cache that holds the stub and these packs in this order, and what is still to be fed to the model.

        Args:
            chunk_ids: ingested packs; one may come twice.
            suffix_token_ids: the rest of the prompt, see `prepare`.
            max_packs: more are refused,
            allow_fine_grain: unless this says that it is meant.

        Raises:
            ValueError: no packs, or more than `max_packs`.
            RuntimeError: there is no stub.
            KeyError: a pack is not known, or its K/V is gone and its tokens are not known here.
            PionMlxCompatError: `self_check` found too little agreement.
        """
        started = time.perf_counter()
        with self._lock:
            chunk_ids = [chunk_ids] if isinstance(chunk_ids, str) else list(chunk_ids)
            if not chunk_ids:
                raise ValueError("no chunks: prepare_multi needs at least one id")
            if len(chunk_ids) > max_packs and not allow_fine_grain:
                raise ValueError(
                    f"{len(chunk_ids)} packs are more than max_packs={max_packs}: packs do not see each other, and the "
                    "published measurement recalled 15/27 facts from 20 packs, 26/27 from the same text in one. Ingest "
                    "fewer and longer chunks, or pass allow_fine_grain=True"
                )
            stub = self._shared_stub("prepare_multi")
            if self._refused is not None:
                raise caches.PionMlxCompatError(self._refused)
            suffix = self._suffix(suffix_token_ids)
            packs = {
                chunk_id: self._chunks.find(chunk_id, self._multi_entry(chunk_id))
                for chunk_id in dict.fromkeys(chunk_ids)
            }
            rows = {chunk_id: self._chunks.rows(pack) for chunk_id, pack in packs.items()}
            segments, position = [(stub.rows or [], 0, 0)], len(stub.ids)
            for chunk_id in chunk_ids:
                segments.append((rows[chunk_id], len(stub.ids), position))
                position += len(packs[chunk_id].ids) - len(stub.ids)
            cache = assembled(self.model, segments, Mover(self._movable()))
            return self._handed_out(cache, suffix, packs[chunk_ids[-1]].ids, started)

    def self_check(
        self,
        model: Any = None,
        *,
        tokenizer: Any = None,
        samples: Sequence[Sample] | None = None,
        tokens: int = 16,
        least: float = agreement.LEAST,
    ) -> Agreement:
        """Compare moved packs with a full computation of the same prompt.

        Args:
            model: another one than this object's, for example a quantized copy.
            tokenizer: encodes the built-in samples; anything with ``encode(text, add_special_tokens=...)``.
            samples: (stub, chunks, question) as token ids, instead of the built-in texts.
            tokens: how many tokens after each question are compared.
            least: the share of equal tokens below which the model is refused.

        Raises:
            PionMlxCompatError: fewer agree; from then on `prepare_multi` says the same, until a check passes.
            ValueError: neither samples nor a tokenizer.
        """
        with self._lock:
            own = model is None or model is self.model
            checked = self.model if own else model
            ropes = self._movable() if own else verified_ropes(checked, len(plain_cache(checked)))
            result = agreement.measure(checked, ropes, agreement.given(samples, tokenizer), tokens)
            refused = None
            if result.agreement < least:
                refused = (
                    f"composed packs say {result.agreement:.0%} of {result.tokens} tokens as a full computation, "
                    f"less than {least:.0%} (largest difference of a logit: {result.logit_difference:.2f})"
                )
            if own:
                self._refused = refused
            if refused is not None:
                raise caches.PionMlxCompatError(refused)
            return result

    # --- what is there ---------------------------------------------------------------------------------------------

    def has(self, chunk_id: str) -> bool:
        """Whether the manifest lists a chunk."""
        with self._lock:
            return self._manifest.get(chunk_id) is not None

    def evict(self, chunk_id: str, *, server: bool = False) -> bool:
        """Forget a chunk here and in the manifest; with `server`, also there. Returns whether it was known."""
        with self._lock:
            entry, known = self._manifest.get(chunk_id), self._chunks.known.pop(chunk_id, None)
            if server and self._server is not None and entry is not None:
                self._server.pc.drop(entry["namespace"])
            return self._manifest.remove(chunk_id) or known is not None

    def stats(self) -> dict[str, Any]:
        """Counts and milliseconds of this object.

        ``ingest_count``: contents taken in, repeats not counted. ``hydrate_miss_count``: chunks that were asked for
        and gone; ``reencode_count``: those that could be, and were, computed again.
        """
        with self._lock:
            chunks = self._chunks
            stats: dict[str, Any] = {
                "backend": self.backend,
                "ingest_count": chunks.ingest_count,
                "hydrate_count": self.hydrate_count,
                "hydrate_miss_count": chunks.hydrate_miss_count,
                "reencode_count": chunks.reencode_count,
                "chunks_in_manifest": len(self._manifest),
                "chunks_in_inproc": sum(pack.rows is not None for pack in chunks.known.values()),
                "encode_ms_total": chunks.encode_ms_total,
                "prepare_ms_total": self.prepare_ms_total,
            }
            if self._server is not None:
                stats["encode_ms_total"] += self._server.encode_ms_total
                stats["pion_fetch_ms_total"] = self._server.pc.fetch_ms_total
                stats["pion_store_ms_total"] = self._server.pc.store_ms_total
            return stats

    def close(self) -> None:
        """Close the connections of backend ``"pion"``."""
        if self._server is not None:
            self._server.pc.close()

    def __enter__(self) -> HybridRetrievalCache:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    # --- checks ----------------------------------------------------------------------------------------------------

    def _suffix(self, suffix_ids: Any) -> list[int]:
        if suffix_ids is None or not len(suffix_ids):
            return []
        ids: list[int] = token_array(suffix_ids).tolist()
        return ids

    def _movable(self) -> list[Rope | None]:
        if self._ropes is None:
            self._ropes = verified_ropes(self.model, len(plain_cache(self.model)))
        return self._ropes

    def _shared_stub(self, method: str) -> Pack:
        stub = self._chunks.begin().stub
        if stub is None:
            raise RuntimeError(
                f"call set_shared_stub(...) before {method}(...): without an instruction in front, packs give nonsense"
            )
        return stub

    def _multi_entry(self, chunk_id: str) -> Entry:
        entry = self._manifest.get(chunk_id)
        if entry is None or "encoded_at" not in entry:
            raise KeyError(f"no pack {chunk_id!r}: ingest_pack({chunk_id!r}, token_ids)")
        return entry

    def _handed_out(
        self, cache: list[Any], suffix: list[int], last: np.ndarray[Any, Any], started: float
    ) -> tuple[list[Any], list[int]]:
        if not suffix:
            for layer in cache:
                layer.trim(1)
            suffix = [int(last[-1])]
        self.hydrate_count += 1
        self.prepare_ms_total += (time.perf_counter() - started) * 1e3
        return cache, suffix
