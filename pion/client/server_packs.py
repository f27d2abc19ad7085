"""Chunks on a Pion server: rows as any prefix, and the token ids beside them, for other processes."""

from __future__ import annotations

import logging
from typing import Any, Final

import numpy as np

from pion.client.prompt_cache import PionPromptCache
from pion.errors import CommandError

__all__ = ["ServerPacks"]

log = logging.getLogger("pion.client")

_TOKENS: Final = 1  # number of the state that holds the token ids, u32 little endian


class ServerPacks:
    """Stores and fetches chunks for a `HybridRetrievalCache`.

    Args:
        pc: with ``on_mismatch="recompute"``; it is the caller's to close.
    """

    def __init__(self, pc: PionPromptCache) -> None:
        self.pc = pc
        self.encode_ms_total = 0.0

    def has(self, ids: np.ndarray[Any, Any], namespace: str) -> bool:
        """Whether the server holds the rows of these tokens and this model."""
        return self.pc.lookup(namespace, ids)

    def upload(self, ids: np.ndarray[Any, Any], namespace: str) -> None:
        """Have the server hold exactly this, whatever it holds under that name. An outage is logged, no error."""
        if self.has(ids, namespace):
            try:
                if not np.array_equal(self.tokens(namespace), ids):
                    self._keep_tokens(ids, namespace)
            except (CommandError, OSError) as error:
                log.warning("tokens of %s are not stored: %s", namespace, error)
            return
        self.pc.on_mismatch = "replace"
        try:
            self.fetch(ids, namespace)
        finally:
            self.pc.on_mismatch = "recompute"

    def fetch(self, ids: np.ndarray[Any, Any], namespace: str) -> tuple[list[Any], bool]:
        """The cache of a chunk, and whether it was there; else it is computed, and stored unless the name is taken."""
        pc = self.pc
        misses, trouble, mismatches = pc.misses, (pc.store_errors, pc.outages), pc.mismatches
        cache = pc.get_or_prefill(ids, namespace)
        if pc.misses == misses:
            return cache, True
        self.encode_ms_total += pc.last_prefill_ms
        stored = trouble == (pc.store_errors, pc.outages)
        if stored and (pc.mismatches == mismatches or pc.on_mismatch == "replace"):
            try:
                self._keep_tokens(ids, namespace)
            except (CommandError, OSError) as error:
                log.warning("tokens of %s are not stored: %s", namespace, error)
        return cache, False

    def _keep_tokens(self, ids: np.ndarray[Any, Any], namespace: str) -> None:
        reply = self.pc.resp.call("SSM.PREFIX.STORE", namespace, _TOKENS, ids.tobytes())
        if reply.startswith(b"-"):
            raise CommandError(reply[1:].decode().strip())

    def tokens(self, namespace: str) -> np.ndarray[Any, Any]:
        """The tokens that the server has for a name, none if it has nothing. They are what somebody wrote there:
        hold them against a digest.

        Raises:
            CommandError: the server refused.
            OSError: it cannot be reached.
        """
        reply = self.pc.resp.call("SSM.PREFIX.FETCH", namespace, _TOKENS)
        if reply.startswith(b"-"):
            raise CommandError(reply[1:].decode().strip())
        blob = b"" if reply.startswith((b"$-", b"_")) else reply.partition(b"\r\n")[2][:-2]
        return np.frombuffer(blob[: len(blob) // 4 * 4], "<u4")
