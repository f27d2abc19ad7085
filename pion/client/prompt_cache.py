"""`PionPromptCache`: a prompt cache for mlx-lm that other processes have already filled.

    pc = PionPromptCache(model)
    cache = pc.get_or_prefill(prefix_ids, namespace=ns)
    text = generate(model, tok, prompt=suffix_ids, prompt_cache=cache)

The first process that asks for a prefix computes and stores it; every later one, on any machine, after any restart,
fetches it. What is fetched is checked against a digest of the tokens and the model. A server that is down costs only
the saving: the prefix is computed locally, which is said once.
"""

from __future__ import annotations

import contextlib
import logging
import os
import ssl as tls
import threading
import time
from collections import OrderedDict
from dataclasses import replace
from typing import Any, Final, Literal, TypeVar

from pion.client import caches, calls, transfer
from pion.client.address import Address
from pion.client.caches import Layout
from pion.client.connection import Steps
from pion.client.errors import IncompleteError
from pion.client.explain import Explanation, block_table, explain
from pion.client.formats import Formats
from pion.client.identity import model_identity, prefix_digest
from pion.client.lanes import Lanes
from pion.client.layerwise import LayerMethods
from pion.client.local import DEFAULT_BYTES
from pion.client.namespace import make_namespace, token_array
from pion.client.pool import Pool
from pion.client.raw import RawCommands
from pion.client.seam import split_at_seam
from pion.errors import AuthenticationError, CommandError, MismatchError
from pion.limits import DEFAULT_PORT, MAX_NAMESPACE, MAX_PREFILL_MS

__all__ = ["PionPromptCache"]

log = logging.getLogger("pion.client")

_LATER: Final = "is not in this version of Pion"
_NEEDS_MODEL: Final = "this method requires a model — construct PionPromptCache(model) to use it"
_OBSERVED_MAX: Final = 65_536  # namespaces whose misses are counted for admission_threshold
_LONGEST_PAUSE: Final = 30.0  # seconds in which a server that did not answer is not asked again

Outcome = Literal["hit", "miss", "mismatch", "down"]
T = TypeVar("T")


class PionPromptCache(LayerMethods):
    """Fetches a prefix's K/V from a Pion server, or computes and stores it.

    Args:
        model: an mlx-lm model whose layers all have a plain ``KVCache``. None gives a client for `lookup`, `drop`,
            `save`, `commit` and raw commands that needs no mlx.
        vquant: the stored format. ``"fp16"`` keeps fp16 and bf16 models word for word and rounds fp32 models to fp16;
            ``"native"`` is lossless for all; the quantized ones are smaller and cost some of the answer's likeness:
            ``"int8"``, ``"fp8"``, ``"mlx4g32"``, ``"turbo4"``, ``"turbo3"``, ``"turbo2"``; see docs/quality.md.
        host, port: the server; a host that starts with ``/`` is a Unix socket.
        stage2, softmax_bitexact: in the signature of the published client; refused here unless off.
        admission_threshold: the n-th miss of a namespace in this process is the first one stored; 1 = store at once.
        boundary_protect: V of so many layers at either end is kept in fp16, and K of all layers, where vquant is a
            quantized format; with `k_format`, K has that format but for the same layers.
        prefill_chunk_size: tokens per forward pass when computing; None = one pass.
        k_format, v_format: stored formats of K and of V, instead of vquant.
        url: ``pion://user:password@host:port`` and the like instead of host and port; see ``Address.of``.
        username, password: credentials; else ``$PION_USERNAME`` and ``$PION_PASSWORD``.
        ssl: True or an ``ssl.SSLContext``.
        on_mismatch: what to do when the namespace holds other tokens, another model or another format: ``"raise"``,
            ``"recompute"`` (leave the stored one alone) or ``"replace"``.
        background_store: return from a cold `get_or_prefill` while the rows are still being sent. Every later call of
        this
            object waits for them; other processes may miss until then.
        timeout: seconds without progress after which the server counts as down; None: the URL's, else 60.
        local_bytes: memory for copies of prefixes that this process uses again and again; 0 or
            ``PION_PROMPT_CACHE_NO_INPROC=1`` in the environment keeps none.

    Raises:
        ImportError: a model was given but mlx or mlx-lm is missing.
        PionMlxCompatError: the model's cache cannot be stored by this version; nothing was sent.
        ValueError: an argument is not offered; the text says which.

    A namespace names one token sequence for one model and format: build it with `make_namespace`. The object may be
    shared between threads; the server is then used by one at a time.
    """

    make_namespace = staticmethod(make_namespace)

    def __init__(
        self,
        model: Any = None,
        vquant: str = "fp16",
        host: str = "127.0.0.1",
        port: int = DEFAULT_PORT,
        stage2: bool = False,
        admission_threshold: int = 1,
        boundary_protect: int = 0,
        prefill_chunk_size: int | None = None,
        softmax_bitexact: bool = False,
        *,
        k_format: str | None = None,
        v_format: str | None = None,
        url: str | None = None,
        username: str | None = None,
        password: str | None = None,
        ssl: bool | tls.SSLContext | None = None,
        on_mismatch: Literal["recompute", "replace", "raise"] = "raise",
        background_store: bool = False,
        timeout: float | None = None,
        local_bytes: int = DEFAULT_BYTES,
    ) -> None:
        for name, asked in (
            ("stage2=True", stage2),
            ("softmax_bitexact=True", softmax_bitexact),
        ):
            if asked:
                raise ValueError(f"{name} {_LATER}")
        self.formats = Formats.of(vquant, k_format, v_format, boundary_protect)
        if on_mismatch not in ("recompute", "replace", "raise"):
            raise ValueError(f"on_mismatch must be 'recompute', 'replace' or 'raise', not {on_mismatch!r}")
        if prefill_chunk_size is not None and prefill_chunk_size < 0:
            raise ValueError("prefill_chunk_size must be a positive number of tokens, or None for one pass")
        where: dict[str, Any] = {} if url else {"path": host} if host.startswith("/") else {"host": host, "port": port}
        if timeout is not None:
            where["timeout"] = timeout
        known = os.environ.get("PION_PASSWORD")
        if username is not None and password is None:
            password = known
        address = Address.of(url, **where, ssl=ssl, username=username, password=password, protocol=2)
        if address.password is None and known:
            address = replace(address, username=os.environ.get("PION_USERNAME") or None, password=known)
        if address.timeout is not None and address.timeout < address.connect_timeout:
            address = replace(address, connect_timeout=address.timeout)

        self.model = model
        self.vquant = vquant
        self.admission_threshold = max(1, admission_threshold)
        self.prefill_chunk_size = prefill_chunk_size or None
        self.on_mismatch = on_mismatch
        self.background_store = background_store
        self.layout = None if model is None else caches.inspect_model(model)
        if self.layout is not None:
            self.formats.check(self.layout.dtype, self.layout.cache_len, self.layout.kv_dim)
        self.address = address
        self.lanes = Lanes(address, local_bytes)
        self._pool = Pool(address, 4)
        self.resp = RawCommands(self._pool)
        self.hits = self.misses = self.admission_skips = 0
        self.mismatches = self.outages = self.store_errors = 0
        self.fetch_ms_total = self.store_ms_total = self.last_prefill_ms = 0.0
        self.attend_query_ms_total, self.attend_query_calls, self.cold_rehydrates_observed = 0.0, 0, 0
        self._observed: OrderedDict[str, int] = OrderedDict()
        self._down = False
        self._pause_until = 0.0
        self._storing: list[threading.Thread] = []

    # --- the prefix -----------------------------------------------------------------------------------------------

    def get_or_prefill(self, prefix_token_ids: Any, namespace: str) -> list[Any]:
        """The prompt cache of a prefix: fetched when the server has it, else computed here and stored.

        Args:
            prefix_token_ids: a flat sequence of token ids, at least one.
            namespace: the key, see `make_namespace`.

        Returns:
            What ``mlx_lm.models.cache.make_prompt_cache(model)`` returns, holding exactly the prefix. It belongs to
            the caller alone.

        Raises:
            RuntimeError: this object has no model.
            MismatchError: the namespace holds something else and ``on_mismatch="raise"``; nothing was computed.
            AuthenticationError: credentials are missing, wrong, or not enough.
            ssl.SSLError: TLS failed.
            CommandError: the server refused the lookup for another reason.
        """
        layout = self._layout()
        ids = token_array(prefix_token_ids)
        if not ids.size:
            raise ValueError("the prefix has no tokens")
        vocabulary = getattr(getattr(self.model, "args", None), "vocab_size", None)
        if isinstance(vocabulary, int) and ids.max() >= vocabulary:  # mlx would read beyond the embeddings
            raise ValueError(f"token id {ids.max()} is not in the model's vocabulary of {vocabulary}")
        if not isinstance(namespace, str):
            raise TypeError(f"a namespace is a str, not {type(namespace).__name__}; make_namespace() makes one")
        if not 1 <= len(namespace.encode()) <= MAX_NAMESPACE:
            raise ValueError(f"a namespace has 1 to {MAX_NAMESPACE} bytes; make_namespace() makes one of 32")
        digest = prefix_digest(model_identity(self.model), ids)

        started = time.perf_counter()
        outcome, reason, infos = self._ask(namespace, digest, describe=True)
        if outcome == "hit":
            outcome, reason, cache = self._fetch(namespace, digest, infos, layout, len(ids), started)
            if outcome == "hit":
                return cache
        if outcome == "mismatch":
            self._mismatch(namespace, reason)

        self.misses += 1
        started = time.perf_counter()
        cache = caches.prefill(self.model, ids.tolist(), self.prefill_chunk_size)
        self.last_prefill_ms = (time.perf_counter() - started) * 1e3
        if outcome == "down" or not self._admitted(namespace):
            return cache
        if outcome == "miss" or self.on_mismatch == "replace":
            self._store(namespace, layout, digest, cache, ids)
        return cache

    def prepare(self, tokenizer: Any, prefix: str, suffix: str, namespace: str) -> tuple[list[Any], list[int]]:
        """The same for texts: a cache, and the ids still to be fed to the model.

        The ids of ``prefix + suffix`` need not start with the ids of `prefix`: a tokenizer merges across the border.
        The stored prefix is then cut back, by at most 8 tokens, to where the two agree.

        Args:
            tokenizer: anything with ``encode(text, add_special_tokens=...)``.
            prefix: the shared text.
            suffix: the rest, not empty.
            namespace: the key of the prefix.
        """
        stored, kept, rest = split_at_seam(tokenizer.encode, prefix, suffix)
        cache = self.get_or_prefill(stored, namespace)
        for layer in cache:
            layer.trim(len(stored) - kept)
        return cache, rest

    def lookup(self, namespace: str, prefix_token_ids: Any = None) -> bool:
        """Whether the server holds all rows of a namespace.

        Args:
            namespace: the key.
            prefix_token_ids: when given (and there is a model), also whether they are the rows of these tokens.

        Returns:
            False when it does not, holds something else, or cannot be reached.

        Raises:
            AuthenticationError, CommandError, ssl.SSLError: the server refused the question.
        """
        digest = None
        if prefix_token_ids is not None:
            self._layout()
            digest = prefix_digest(model_identity(self.model), prefix_token_ids)
        return self._ask(namespace, digest, describe=False)[0] == "hit"

    def explain(self, prefix_token_ids: Any, namespace: str) -> Explanation:
        """Why `get_or_prefill` would fetch these tokens or compute them: how many are asked for, stored and shared,
        where the first difference lies, and a sentence. Nothing is fetched, computed or counted.

        Raises:
            RuntimeError: this object has no model.
            OSError, CommandError: the server cannot be asked.
        """
        self._layout()
        ids = token_array(prefix_token_ids)
        return self._run(explain(namespace, prefix_digest(model_identity(self.model), ids), ids))

    def drop(self, *namespaces: str) -> int:
        """Delete prefixes on the server; returns how many of them it held."""
        return int(self._run(calls.drop(namespaces)))

    def commit(self) -> None:
        """Return once everything stored so far would survive a power loss."""
        self._run(calls.commit())

    def save(self, path: str | None = None) -> None:
        """`commit` and an index checkpoint; with `path`, a copy of the store in the server's data directory."""
        self._run(calls.save(path))

    def stats(self) -> dict[str, Any]:
        """What this object did so far: counts, and milliseconds spent fetching, storing and prefilling."""
        asked = self.hits + self.misses
        return {
            "hits": self.hits,
            "misses": self.misses,
            "hit_rate": self.hits / asked if asked else 0.0,
            "admission_skips": self.admission_skips,
            "admission_threshold": self.admission_threshold,
            "fetch_ms_total": self.fetch_ms_total,
            "store_ms_total": self.store_ms_total,
            "last_prefill_ms": self.last_prefill_ms,
            "mismatches": self.mismatches,
            "outages": self.outages,
            "store_errors": self.store_errors,
            "lanes": dict(self.lanes.used),
        }

    def __repr__(self) -> str:
        model = "no model" if self.model is None else type(self.model).__module__.rpartition(".")[2]
        return f"<PionPromptCache {model}, {self.vquant}, {self.address}>"

    def close(self) -> None:
        """Wait for a background store and close the connections. The object cannot be used afterwards."""
        self._wait()
        self._pool.close()

    def __enter__(self) -> PionPromptCache:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    # --- talking to the server ------------------------------------------------------------------------------------

    def _wait(self) -> None:
        for thread in self._storing[:]:
            if thread is not threading.current_thread():
                thread.join()
                with contextlib.suppress(ValueError):  # another caller waited for it as well
                    self._storing.remove(thread)

    def _run(self, steps: Steps[T]) -> T:
        self._wait()
        return self._pool.run(steps, self.address.timeout)

    def _went_down(self, error: BaseException) -> None:
        self.outages += 1
        if not self._down:
            self._down = True
            log.warning("%s cannot be used (%s); prefixes are computed locally until it can", self.address, error)

    def _came_back(self) -> None:
        if self._down:
            self._down = False
            log.warning("%s can be used again", self.address)

    def _ask(self, namespace: str, digest: str | None, *, describe: bool) -> tuple[Outcome, str, list[Any]]:
        """LOOKUP: what the server says, why, and what it describes."""
        started = time.monotonic()
        if started < self._pause_until:
            self.outages += 1
            return "down", "", []
        try:
            hit, infos = self._run(transfer.lookup(namespace, digest, describe=describe))
        except MismatchError as error:
            self._came_back()
            return "mismatch", str(error), []
        except tls.SSLError:
            raise
        except OSError as error:
            # A refused connection costs nothing and is tried each time; a silent host at most a third of the time.
            ended = time.monotonic()
            self._pause_until = ended + min(_LONGEST_PAUSE, 2 * (ended - started))
            self._went_down(error)
            return "down", str(error), []
        self._came_back()
        return ("hit" if hit else "miss"), "", infos

    def _mismatch(self, namespace: str, reason: str, *, computed: bool = False) -> None:
        self.mismatches += 1
        if self.on_mismatch == "raise" and not computed:
            raise MismatchError(
                f"{reason} (namespace {namespace!r}; on_mismatch='recompute' leaves it alone, 'replace' overwrites it)"
            )
        what = "it is computed and replaces that" if self.on_mismatch == "replace" else "it is computed, not stored"
        log.warning("prefix %s: %s; %s", namespace, reason, what)

    def _admitted(self, namespace: str) -> bool:
        seen = self._observed[namespace] = self._observed.pop(namespace, 0) + 1
        if len(self._observed) > _OBSERVED_MAX:
            self._observed.popitem(last=False)
        if seen < self.admission_threshold:
            self.admission_skips += 1
        return seen >= self.admission_threshold

    def _layout(self) -> Layout:
        if self.layout is None:
            raise RuntimeError(_NEEDS_MODEL)
        return self.layout

    # --- rows -----------------------------------------------------------------------------------------------------

    def _fetch(
        self, namespace: str, digest: str, infos: list[Any], layout: Layout, rows: int, started: float
    ) -> tuple[Outcome, str, list[Any]]:
        """The cache of a hit; or another outcome, and why, when it cannot be used after all."""
        try:
            wanted = self.formats.sides(layout.dtype, layout.cache_len)
            steps = transfer.fetch(namespace, digest, infos, self.model, layout, wanted, rows, self.lanes)
            cache = self._run(steps)
        except MismatchError as error:
            return "mismatch", str(error), []
        except AuthenticationError:
            raise
        except (IncompleteError, CommandError) as error:
            log.warning("prefix %s cannot be used and is computed again: %s", namespace, error)
            return "miss", str(error), []
        except tls.SSLError:
            raise
        except OSError as error:
            self._went_down(error)
            return "down", str(error), []
        self.fetch_ms_total += (time.perf_counter() - started) * 1e3
        self.hits += 1
        return "hit", "", cache

    def _store(self, namespace: str, layout: Layout, digest: str, cache: list[Any], ids: Any) -> None:
        """Register and send the rows. A failure costs the next caller a miss, never this one its cache."""
        started, rows = time.perf_counter(), len(ids)
        formats = self.formats.sides(layout.dtype, layout.cache_len)
        prefill_ms = min(MAX_PREFILL_MS, max(1, round(self.last_prefill_ms)))
        replace = self.on_mismatch == "replace"
        try:
            blocks = block_table(ids)
            self._run(transfer.register(namespace, layout, formats, rows, digest, prefill_ms, blocks, replace=replace))
        except MismatchError as error:  # meanwhile, or incompletely, something else is stored: the K/V here is right
            self._mismatch(namespace, str(error), computed=True)
            return
        except (AuthenticationError, tls.SSLError):
            raise
        except (CommandError, OSError) as error:
            self._not_stored(namespace, error)
            return
        sides = transfer.packed(cache, rows)
        if not self.background_store:
            self._send(namespace, digest, layout, rows, sides, started)
            return
        # Packed now: the caller is about to append to these arrays, and a reference to them would cost it a copy.
        thread = threading.Thread(
            target=self._send, args=(namespace, digest, layout, rows, list(sides), started), name="pion store"
        )
        self._storing.append(thread)
        thread.start()

    def _send(
        self, namespace: str, digest: str, layout: Layout, rows: int, sides: transfer.Rows, started: float
    ) -> None:
        try:
            self._pool.run(transfer.send(namespace, digest, layout.dtype, rows, sides), self.address.timeout)
        except (CommandError, IncompleteError, OSError) as error:
            self._not_stored(namespace, error)
        self.store_ms_total += (time.perf_counter() - started) * 1e3

    def _not_stored(self, namespace: str, error: Exception) -> None:
        self.store_errors += 1
        if isinstance(error, OSError):
            self._went_down(error)
        log.warning("prefix %s was computed but not stored: %s", namespace, error)
