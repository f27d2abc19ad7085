"""The engine's methods for prefixes: what KV.PREFIX.* calls."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from pion import limits
from pion.errors import CommandError
from pion.store.handouts import Handouts, Offer
from pion.store.keeping import Keeping
from pion.store.layout import PREFIX, Declared, Side
from pion.store.matches import Match, Matches
from pion.store.prefixes import Prefixes
from pion.store.sessions import Sessions
from pion.store.store import Store

T = TypeVar("T")


class PrefixMethods:
    """Mixed into `Engine`."""

    _store: Store
    _sessions: Sessions
    _prefixes: Prefixes
    _keeping: Keeping
    _matches: Matches
    _handouts: Handouts

    if TYPE_CHECKING:

        def _acknowledge(self) -> None: ...  # of the engine
        def _roomy(self, write: Callable[..., T], *args: Any) -> T: ...

    def register(
        self,
        ns: bytes,
        kv_dim: int,
        fmt_code: int,
        *,
        blocks: tuple[int, bytes] | None = None,
        prefill_ms: int = 0,
        rows: int | None = None,
        layers: int | None = None,
        digest: str | None = None,
        scope: bytes | None = None,
        parent: bytes | None = None,
        heads: int | None = None,
        head_dim: int | None = None,
        rope: float | None = None,
        states: int | None = None,
        replace: bool = False,
    ) -> None:
        """Make room for the K/V of a prefix; calling it again with the same arguments changes nothing.

        Args:
            kv_dim, fmt_code: values per row and format of every layer of both sides.
            blocks: (block size, u64 little-endian hashes in token order).
            prefill_ms: what computing the prefix took; for the receipt, not kept over a restart.
            rows, layers: the shape. With it, `lookup` is true only once all rows are there. A prefix of nothing but
                states has 0 layers.
            digest: of token ids and model, hex; compared by `lookup`.
            scope, parent: names searched together; the prefix this one continues, which is kept as long as this one.
            heads, head_dim, rope: what a row is. turbo encodes heads of `head_dim` values (a row in blocks without it),
                and takes the rotation of base `rope` out of the keys.
            states: recurrent states, numbered from 0, without which it is not complete either.
            replace: drop what is stored under another description.

        Raises:
            MismatchError: the name is taken by other K/V.
            CommandError: the format does not take rows of `kv_dim` values.
        """
        declared = Declared(
            rows, layers, digest and digest.lower(), scope, parent, heads, head_dim, rope, states=states
        )
        both = (Side(kv_dim, fmt_code),) * 2
        self._roomy(self._prefixes.register, ns, both, blocks, prefill_ms, declared, replace)
        self._acknowledge()

    def register_schema(
        self,
        ns: bytes,
        k_layers: Sequence[tuple[int, int]],
        v_layers: Sequence[tuple[int, int]],
        *,
        blocks: tuple[int, bytes] | None = None,
        prefill_ms: int = 0,
        rows: int | None = None,
        replace: bool = False,
        **declared: Any,
    ) -> None:
        """`register` with one (dim, format) for each layer of K and of V.

        Args:
            k_layers, v_layers: as many of each as the model has layers. A format is a code; bf16_rope_fp8_body has the
                number of its leading bf16 values from bit 8 on.
            rows: the shape is `rows` of `len(k_layers)` layers.
            declared: digest, scope, parent, heads, head_dim, rope, states as in `register`.
        """
        if not k_layers or len(k_layers) != len(v_layers):
            raise CommandError("ERR a schema has as many layers of K as of V, at least one")
        layers = None if rows is None else len(k_layers)
        said = Declared(rows, layers, **declared)
        if said.digest is not None:
            said = dataclasses.replace(said, digest=said.digest.lower())
        asked = [Side(0, limits.FORMATS["int8"], tuple(side)) for side in (k_layers, v_layers)]
        self._roomy(self._prefixes.register, ns, asked, blocks, prefill_ms, said, replace)
        self._acknowledge()

    def lookup(
        self, ns: bytes, *, digest: str | None = None, tokens: int | None = None, prefill_ms: int | None = None
    ) -> bool:
        """Whether the prefix is here; booked in the ledger.

        Args:
            digest: raise MismatchError when another one is stored.
            tokens, prefill_ms: what the hit saves, if the caller knows better.
        """
        return self._prefixes.lookup(ns, digest and digest.lower(), tokens, prefill_ms)

    def must_load(self, ns: bytes) -> bool:
        """The next use of the prefix reads the headers of its file: call `load` in a thread before it."""
        entry = self._store.find(PREFIX + ns)
        return entry is not None and entry.rows is None

    def load(self, ns: bytes) -> None:
        """Read the headers of a prefix's file; other calls go on meanwhile."""
        self._sessions.load(PREFIX + ns)

    def drop(self, *ns: bytes) -> int:
        """Drop prefixes; how many there were. They stay gone, whatever happens next."""
        dropped = self._prefixes.drop(ns)
        self._acknowledge()
        return dropped

    def abandon(self, ns: bytes, digest: str) -> bool:
        """Drop a prefix that was registered with this digest and is not complete; whether there was one."""
        dropped = self._prefixes.abandon(ns, digest.lower())
        if dropped:
            self._acknowledge()
        return dropped

    def owner(self, ns: bytes) -> int:
        """0 when the prefix is here, -1 otherwise (there is one worker)."""
        return 0 if self._prefixes.held(ns) else -1

    def blocks(self, ns: bytes) -> bytes | None:
        """The block table as registered: u32 block size, u32 count, u64 hashes."""
        return self._prefixes.blocks(ns)

    def membership(self, ns: bytes, blob: bytes) -> bytes | None:
        """Which of these u64 hashes the prefix has: a bitmap, least significant bit first."""
        return self._prefixes.membership(ns, blob)

    def must_match(self, scope: bytes) -> bool:
        """The next `match` reads files: call `match_prepare` in a thread before it."""
        return self._matches.must_prepare(scope)

    def match_prepare(self, scope: bytes) -> None:
        """Read the block tables of a scope that came since the last `match`."""
        self._matches.prepare(scope)

    def match(self, scope: bytes, hashes: bytes, limit: int = 16, name_prefix: bytes = b"") -> list[Match]:
        """Complete prefixes of a scope that begin with the same blocks of tokens, those that share most first.

        Args:
            scope: as registered.
            hashes: chained u64 hashes of the blocks asked for, little-endian, in token order.
            limit: most answers.
            name_prefix: only namespaces that begin so.
        """
        return self._matches.match(scope, hashes, limit, name_prefix)

    def why(self, ns: bytes) -> str:
        """Why a lookup of the namespace is a hit or a miss, and what keeps it."""
        with self._store.lock:
            return self._prefixes.why(ns) + self._keeping.words(PREFIX + ns)

    # --- what keeps a prefix ----------------------------------------------------------------------------------------

    def pin(self, *ns: bytes) -> int:
        """Protect prefixes from eviction, over restarts too; how many are here. DROP and EXPIRE still end them."""
        found = self._roomy(self._keeping.pin, ns, True)
        self._acknowledge()
        return found

    def unpin(self, *ns: bytes) -> int:
        """End that; how many were pinned."""
        found = self._roomy(self._keeping.pin, ns, False)
        self._acknowledge()
        return found

    def expire(self, ns: bytes, when_ms: int, *words: str) -> bool:
        """Let a prefix end at a time in ms since 1970, over restarts too; one that has come drops it at once.

        Args:
            words: of NX, XX, GT, LT, as in Redis's EXPIRE.

        Returns:
            False when it is not here, or the words say no.
        """
        done = self._roomy(self._keeping.expire, ns, when_ms, frozenset(words))
        self._acknowledge()
        return done

    def persist(self, ns: bytes) -> bool:
        """Let a prefix live for ever; False when it did."""
        done = self._roomy(self._keeping.persist, ns)
        self._acknowledge()
        return done

    def lease(self, ns: bytes, milliseconds: int, owner: object = None) -> bool:
        """Keep a prefix from eviction for a time, or claim one that is missing or incomplete; 0 gives the lease back.

        Args:
            owner: who asks; default: this thread.

        Returns:
            False when somebody else has claimed it: wait until it is complete, or the lease has ended.
        """
        return self._keeping.lease(ns, milliseconds, threading.get_ident() if owner is None else owner)

    def about(self, ns: bytes) -> dict[str, str]:
        """What is stored of a prefix, what keeps it and how it is related: the lines of KV.PREFIX.INFO ns."""
        return self._keeping.about(ns)

    # --- all of them ------------------------------------------------------------------------------------------------

    def lane(self, ns: bytes) -> Offer:
        """Where everything of a complete prefix lies in its file, and a ticket for `redeem`.

        Raises:
            CommandError: there is no such prefix, it is not complete, or it is damaged.
        """
        return self._handouts.offer(ns)

    def lane_must_wait(self, ns: bytes) -> bool:
        """`lane` would compare checksums of the whole prefix (once after each start): prepare it, or call it, in a
        thread."""
        return self._handouts.must_wait(ns)

    def redeem(self, ticket: bytes) -> int:
        """A descriptor of the file that a ticket of `lane` is for; it can only read. The caller closes it.

        Raises:
            TicketError: the ticket is not good (any more).
        """
        return self._handouts.redeem(ticket)

    def flush(self) -> int:
        """Drop everything but the keyspace; how many prefixes there were."""
        dropped = self._prefixes.flush()
        self._acknowledge()
        return dropped

    def list(
        self, scope: bytes | None = None, match: bytes | None = None, cursor: int = 0, count: int = 100
    ) -> tuple[int, list[bytes]]:
        """Namespaces from a cursor on, and the next cursor (0 at the end)."""
        return self._prefixes.list(scope, match, cursor, count)
