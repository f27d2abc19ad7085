"""`PionPromptCache` when something changes under it: the model, the entry, the process, the caller's mind."""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import logging
import math
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from pion import Client, HybridRetrievalCache, PionPromptCache
from pion.client import assembly, caches, flights
from pion.client.caches import PionMlxCompatError, Prefilled, pack_rows, prefill
from pion.client.errors import PrefixMissError
from tests.support import families, models
from tests.support.proxy import Proxy

models.need_mlx()
mx = models.mx

_names = itertools.count()


@pytest.fixture
def client(server: Any) -> Iterator[Client]:
    with Client(host="127.0.0.1", port=server.port) as made:
        yield made


@pytest.fixture
def ns() -> str:
    return f"faults-{next(_names)}"


@pytest.fixture
def ids(ns: str) -> list[int]:
    """Of each test its own: what others stored under another name would be found by its tokens."""
    return families.tokens(60, int(ns.rpartition("-")[2]) + 5000)


@pytest.fixture
def cache_of(server: Any) -> Iterator[Callable[..., PionPromptCache]]:
    """A `PionPromptCache` on the server, lossless unless asked for otherwise, closed at the end."""
    made: list[PionPromptCache] = []

    def make(model: Any = None, **options: Any) -> PionPromptCache:
        made.append(PionPromptCache(model, **{"vquant": "native", "port": server.port, **options}))
        return made[-1]

    yield make
    for pc in made:
        pc.close()


def words(cache: list[Any]) -> list[bytes]:
    """The tokens of every layer-side, bit for bit."""
    return [pack_rows(array, layer.offset).tobytes() for layer in cache for array in (layer.keys, layer.values)]


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


# --- the model is changed in place ------------------------------------------------------------------------------------


def test_the_layout_follows_a_model_whose_dtype_is_changed_in_place(
    cache_of: Callable[..., PionPromptCache], ns: str, ids: list[int]
) -> None:
    model = models.tiny_llama("float16")
    pc = cache_of(model)
    pc.get_or_prefill(ids, ns)
    for dtype in ("bfloat16", "float32"):
        model.set_dtype(getattr(mx, dtype))
        mx.eval(model.parameters())
        truth = words(prefill(model, ids, None))
        for _ in range(4):  # computed, fetched, and out of this process
            cache = pc.get_or_prefill(ids, f"{ns}-{dtype}")
            assert {str(a.dtype) for c in cache for a in (c.keys, c.values)} == {f"mlx.core.{dtype}"}
            assert words(cache) == truth
        assert pc.layout is not None
        assert pc.layout.dtype == dtype
        assert pc.put(prefill(model, ids, None), ids, f"{ns}-{dtype}-put") is True
        assert words(pc.get_or_prefill(ids, f"{ns}-{dtype}-put")) == truth
    assert (pc.hits, pc.misses, pc.store_errors) == (8, 3, 0)


def test_chunks_follow_a_model_whose_dtype_is_changed_in_place(server: Any) -> None:
    model = models.tiny_llama("float16", max_position_embeddings=2048)
    with HybridRetrievalCache(model, "pion", port=server.port) as held, HybridRetrievalCache(model) as fresh:
        for each in (held, fresh):
            each.set_shared_stub([1, 2, 3])
            each.ingest_pack("x", [5, 6, 7, 8, 9, 10])
            each.prepare_multi(["x"], [1])
        model.set_dtype(mx.bfloat16)
        mx.eval(model.parameters())
        for _ in range(3):
            got, want = (each.prepare_multi(["x"], [1])[0] for each in (held, fresh))
            assert got[0].keys.dtype == mx.bfloat16
            assert words(got) == words(want)


@pytest.mark.parametrize("as_states", [False, True])
def test_packing_refuses_a_cache_that_is_not_of_the_layout(as_states: bool, ids: list[int]) -> None:
    layout = caches.inspect_model(models.tiny_llama("float16"))
    array = np.array(ids, "<u4")
    for other, named in (
        (models.tiny_llama("bfloat16"), "bfloat16"),
        (models.tiny_llama("float16", hidden_size=64), "2 heads x 16"),
        (models.tiny_llama("float16", num_key_value_heads=4), "4 heads x 8"),
    ):
        with pytest.raises(PionMlxCompatError, match=named):
            assembly.planned(Prefilled(prefill(other, ids, None)), layout, array, bytes(32), as_states)
    with pytest.raises(ValueError, match="of 60 tokens in a cache that should hold 59"):
        assembly.planned(
            Prefilled(prefill(models.tiny_llama("float16"), ids, None)), layout, array[:59], bytes(32), as_states
        )


# --- DROP at any moment -----------------------------------------------------------------------------------------------


def states_of(client: Client, ns: str) -> list[Any]:
    """The first states that are held under a name, declared or not."""
    return [client.call("SSM.PREFIX.FETCH", ns, number) for number in range(3)]


@pytest.mark.parametrize("family", ["llama", "jamba"])
@pytest.mark.parametrize("moment", ["rows", "states"])
def test_a_drop_in_the_middle_of_a_store_leaves_nothing_that_blocks_the_name(
    cache_of: Callable[..., PionPromptCache], client: Client, between: Proxy, ns: str, ids: list[int], family: str,
    moment: str,
) -> None:  # fmt: skip
    model = families.tiny(family)
    seen: list[bytes] = []

    def drop(request: bytes) -> None:
        at = b"V.STOREBATCH" if moment == "rows" else b"SSM.PREFIX.STORE"
        if at in request and not seen:
            seen.append(request)
            client.drop(ns)

    between.before, between.piece = drop, 1000
    pc = cache_of(model, port=between.port, local_bytes=0)
    pc.get_or_prefill(ids, ns)
    assert (len(seen), pc.store_errors) == (1, 1)
    assert states_of(client, ns) == [None] * 3
    pc.get_or_prefill(ids, ns)
    pc.get_or_prefill(ids, ns)
    assert (pc.hits, pc.misses, pc.mismatches, pc.store_errors) == (1, 2, 0, 1)


def test_states_that_nobody_registered_are_replaced(
    cache_of: Callable[..., PionPromptCache], client: Client, ns: str, ids: list[int]
) -> None:
    pc = cache_of(models.tiny_llama())
    for each, store in (
        (ns, pc.get_or_prefill),
        (f"{ns}-put", lambda ids, ns: pc.put(prefill(pc.model, ids, None), ids, ns)),
    ):
        for number in (0, 1, 7):
            assert client.call("SSM.PREFIX.STORE", each, number, b"left over") == "OK"
        store(ids, each)
        pc.get_or_prefill(ids, each)
        assert states_of(client, each)[2] is None
    assert (pc.hits, pc.misses, pc.mismatches, pc.store_errors) == (2, 1, 0, 0)


@pytest.mark.parametrize("command", [b"KV.PREFIX.LOOKUP", b"V.INFO", b"KV.PREFIX.LANE", b"SSM.PREFIX.FETCH"])
def test_a_drop_between_the_questions_of_a_lookup_is_a_miss(
    byte_server: Callable[..., Any], answers: dict[str, Any], ns: str, ids: list[int], command: bytes
) -> None:
    """From this command on the server of this test has lost the entry that its LOOKUP found."""
    running, lost = byte_server(), []

    def answer(peer: Any, argv: list[bytes]) -> Any:
        name = argv[0].upper()
        if name == b"KV.PREFIX.LOOKUP":
            return b"HIT" if command != name else b"MISS"
        if name == command:
            lost.append(name)
        if name in (b"V.INFO", b"KV.PREFIX.LANE", b"SSM.PREFIX.FETCH"):
            return answers["error"]("ERR session not found")
        return answers["ordinary"](peer, argv)

    running.answer = answer
    with PionPromptCache(models.tiny_llama(), port=running.port) as pc:
        assert pc.get_or_prefill(ids, ns)[0].offset == len(ids)
        assert (pc.hits, pc.misses) == (0, 1)
        with pytest.raises(PrefixMissError):
            pc.lazy(ids, ns)


# --- a call that is interrupted ---------------------------------------------------------------------------------------


def leases() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "pion lease"]


class Interrupted:
    """Raises KeyboardInterrupt at the n-th moment at which Python looks for signals in the client's own code: when a
    function begins, and when one that is written in C has returned."""

    FILES = ("client/work.py", "client/flights.py", "client/prompt_cache.py")

    def __init__(self, at: int) -> None:
        self.at, self.moments = at, 0

    def __enter__(self) -> Interrupted:
        sys.setprofile(self.look)
        return self

    def __exit__(self, *_exc: object) -> None:
        sys.setprofile(None)

    def look(self, frame: Any, event: str, _argument: Any) -> None:
        if event in ("call", "c_return") and frame.f_code.co_filename.endswith(self.FILES):
            self.moments += 1
            if self.moments == self.at:
                raise KeyboardInterrupt


@pytest.mark.parametrize("background", [False, True])
def test_ctrl_c_at_any_moment_of_a_cold_get_keeps_nobody_waiting(
    cache_of: Callable[..., PionPromptCache], client: Client, ns: str, monkeypatch: pytest.MonkeyPatch, background: bool
) -> None:
    monkeypatch.setattr(flights, "_RENEW", 0.05)
    pc = cache_of(models.tiny_llama(), background_store=background)
    pc.get_or_prefill([1], ns)
    with Interrupted(0) as counted:
        pc.get_or_prefill(families.tokens(20, 1), f"{ns}-whole")
    pc.close()
    assert counted.moments > 60
    for at in range(1, counted.moments + 1):
        name, ids = f"{ns}-{at}", families.tokens(20, at)
        pc = cache_of(pc.model, background_store=background)
        with contextlib.suppress(KeyboardInterrupt), Interrupted(at):
            pc.get_or_prefill(ids, name)
        pc._join()
        deadline = time.monotonic() + 5
        while leases() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not leases(), at
        for key in list(flights._turns):
            turn, ours = flights.begin(key)
            assert ours, at
            flights.end(key, turn, stored=False)
        info = client.call("KV.PREFIX.INFO", name)
        assert info is None or b"lease_ms:0" in info, at
        pc.close()


def test_a_lease_ends_with_the_call_that_computes(
    cache_of: Callable[..., PionPromptCache], client: Client, ns: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if the call could not give it back."""
    monkeypatch.setattr(flights, "_RENEW", 0.05)
    run, renewed = cache_of().resp, threading.Event()

    def ask(command: list[Any]) -> bytes:
        reply = run.call(*command)
        renewed.set()
        return reply

    def call() -> flights.Claim:
        holder = flights.Holder(sys._getframe())
        claim = flights.Claim(ask, ns, holder)
        assert run.call(*claim.command) == b":1\r\n"
        claim.start()
        assert renewed.wait(30)
        assert (holder.active, run.call(*flights.claim_command(ns, "another", 1))) == (True, b":0\r\n")
        return claim  # as if an interrupt had skipped what gives it back

    claim = call()
    for thread in leases():
        thread.join(30)
    assert (leases(), claim.holder.active) == ([], False)
    assert run.call(*flights.claim_command(ns, "another", 1)) == b":1\r\n"


def test_a_waiting_thread_does_not_wait_for_a_call_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flights, "_LOOK", 0.02)

    def call() -> flights.Turn:
        return flights.begin("key", flights.Holder(sys._getframe()))[0]

    turn = call()
    started = time.monotonic()
    assert turn.wait(60) is False
    assert time.monotonic() - started < 10
    again, ours = flights.begin("key")
    assert ours
    flights.end("key", again, stored=True)
    assert again.wait(math.inf) is True


# --- a forked child ---------------------------------------------------------------------------------------------------

FORKED = """
import json, os, sys
from tests.support import models
mode, port, ns = sys.argv[1], int(sys.argv[2]), sys.argv[3]
from pion import PionPromptCache
from pion.client import flights, mlx_arrays
mlx_arrays._PATIENCE = 1.5
import mlx.core as mx
ids, model, pc = list(range(1, 40)), None, None
if mode == "used":
    model = models.tiny_llama()
    pc = PionPromptCache(model, port=port)
    pc.get_or_prefill(ids, ns)
elif mode == "elsewhere":
    model = models.tiny_llama()
out, into = os.pipe()
pid = os.fork()
if pid == 0:
    def said(call):
        try:
            return str(call())[:80]
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    if pc is None:
        model = model or models.tiny_llama()
        found = [said(lambda: PionPromptCache(model, port=port).get_or_prefill(ids, ns)[0].offset)]
    else:
        found = [said(call) for call in (
            lambda: pc.get_or_prefill(ids, ns), lambda: pc.get_or_prefill(ids, "cold"), lambda: pc.explain(ids, ns),
            lambda: pc.lookup(ns, ids), lambda: pc.put([], ids, ns), lambda: pc.lazy(ids, ns),
            lambda: PionPromptCache(model, port=port),
            lambda: pc.lookup(ns), lambda: pc.resp.call("PING"), lambda: pc.drop(ns), pc.commit, pc.stats,
        )]
    os.write(into, json.dumps(found).encode())
    os._exit(0)
os.close(into)
print(os.read(out, 1 << 16).decode())
os.waitpid(pid, 0)
"""


@pytest.mark.parametrize("mode", ["used", "elsewhere", "loaded"])
def test_a_forked_child_of_a_process_that_used_mlx_is_told_so(server: Any, ns: str, mode: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORKED, mode, str(server.port), ns],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([os.getcwd(), *filter(None, sys.path)])},
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    said = json.loads(done.stdout)
    refusal = "PionMlxCompatError: this process was forked from one that had used mlx"
    if mode == "used":
        assert [text.startswith(refusal) and "spawn" in text for text in said[:7]] == [True] * 7, said
        assert said[7:11] == ["True", "b'+PONG\\r\\n'", "1", "None"]
        assert said[11].startswith("{")
    elif mode == "elsewhere":
        assert said[0].startswith(refusal)
    else:  # where the parent had only imported it
        assert said == ["39"]


# --- entries that lie -------------------------------------------------------------------------------------------------


def _quoted(name: str, text: str) -> Callable[[dict[str, Any]], bytes]:
    """A manifest in which this text stands for a value."""

    def lie(manifest: dict[str, Any]) -> bytes:
        changed = json.loads(json.dumps(manifest))
        if name == "rows":
            changed["leaves"][1]["rows"] = "@@"
        else:
            changed[name] = "@@"
        return json.dumps(changed).replace('"@@"', text).encode()

    return lie


MANIFESTS = [
    *(_quoted("rows", text) for text in ("1e999", "-1e999", "NaN", "0.5", "null", "true", "9" * 300, "[]")),
    *(_quoted("tokens", text) for text in ("1e999", "1" + "0" * 400, "true")),
    *(_quoted("version", text) for text in ("1.0", "true", "1e999", "null")),
    *(_quoted("boundaries", text) for text in ("[1e999]", "59", "null")),
    *(_quoted("slots", text) for text in ("[1,2]", "null", '[{"class":1e999},{}]', "[" * 900 + "]" * 900)),
    *(_quoted("leaves", text) for text in ("[5,5]", '[{"rows":0}]', '[{"states":[2],"cut":true},{"rows":0}]')),
    lambda _: b"",
    lambda _: b"[" * 100_000,
    lambda _: b"9" * 10_000,
    lambda _: b"\xff",
]


@pytest.mark.parametrize("number", range(len(MANIFESTS)))
def test_a_manifest_that_lies_is_a_miss(
    cache_of: Callable[..., PionPromptCache], client: Client, ns: str, ids: list[int], number: int,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    pc = cache_of(models.tiny_llama(seed=number), local_bytes=0)
    truth = words(pc.get_or_prefill(ids, ns))
    lie = MANIFESTS[number](json.loads(client.call("SSM.PREFIX.FETCH", ns, 0)))
    assert client.call("SSM.PREFIX.STORE", ns, 0, lie) == "OK"
    pc.explain(ids[:40], ns)
    assert len(pc.get_or_prefill([*ids, 7], f"{ns}-near")) == 2
    del caplog.records[:]
    assert words(pc.get_or_prefill(ids, ns)) == truth
    assert (pc.hits, pc.misses) == (0, 3)
    assert sum("cannot be used" in text for text in warnings_of(caplog)) == 1
    assert words(pc.get_or_prefill(ids, ns)) == truth
    assert pc.hits == 1, "it was stored again"


def _state(data: bytes, change: Callable[[dict[str, Any], dict[str, Any]], Any]) -> bytes:
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    about = json.loads(header["__metadata__"]["pion"])
    change(header, about)
    header["__metadata__"]["pion"] = json.dumps(about)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data[8 + length :]


def _shape(*shape: int) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    def change(header: dict[str, Any], _about: dict[str, Any]) -> None:
        for name in header.keys() - {"__metadata__"}:
            start, end = header[name]["data_offsets"]
            header[name] |= {"shape": list(shape), "data_offsets": [start, start if 0 in shape else end]}

    return change


def _number(name: str, value: int) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    return lambda _header, about: about["numbers"].update({name: value})


def _dtype(name: str) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    return lambda header, _about: [header[key].update(dtype=name) for key in header.keys() - {"__metadata__"}]


def _one_token(header: dict[str, Any], _about: dict[str, Any]) -> None:
    for name in header.keys() - {"__metadata__"}:
        batch, heads, _, size = header[name]["shape"]
        start = header[name]["data_offsets"][0]
        header[name] |= {"shape": [batch, heads, 1, size], "data_offsets": [start, start + 4 * batch * heads * size]}


def _nothing(header: dict[str, Any], about: dict[str, Any]) -> None:
    for name in header.keys() - {"__metadata__"}:
        del header[name]
    about["absent"], about["numbers"]["offset"] = ["keys", "values"], 0


STATES = {
    "giant dimensions": _shape(1, 1 << 40, 0, 8), "no tokens": _shape(1, 2, 0, 8),
    "a giant batch": _shape(1 << 62, 0, 1, 1),
    "beyond i64": _shape(1 << 63, 0, 1, 1), "other heads": _shape(1, 1, 60, 16), "by token": _shape(1, 60, 2, 8),
    "offset": _number("offset", 59), "negative": _number("offset", -1), "huge": _number("offset", 1 << 63),
    "other words": _dtype("U32"), "one token": _one_token, "nothing": _nothing,
}  # fmt: skip


@pytest.mark.parametrize("lie", STATES)
@pytest.mark.parametrize("options", [{"softmax_bitexact": True}, {"max_kv_size": 64}], ids=["rows as states", "window"])
def test_a_state_that_lies_is_a_miss(
    cache_of: Callable[..., PionPromptCache], client: Client, ns: str, ids: list[int], options: dict[str, Any],
    lie: str, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    model = families.tiny("qwen2") if "max_kv_size" in options else models.tiny_llama()
    pc = cache_of(model, local_bytes=0, **options)
    kept = [array.tobytes() for array in map(np.array, (layer.keys for layer in pc.get_or_prefill(ids, ns)))]
    assert client.call("SSM.PREFIX.STORE", ns, 2, _state(client.call("SSM.PREFIX.FETCH", ns, 2), STATES[lie])) == "OK"
    got = pc.get_or_prefill(ids, ns)
    assert [array.tobytes() for array in map(np.array, (layer.keys for layer in got))] == kept
    assert (pc.hits, pc.misses) == (0, 2)
    assert sum("cannot be used" in text for text in warnings_of(caplog)) >= 1


def test_a_name_that_is_no_utf8_is_passed_over(
    cache_of: Callable[..., PionPromptCache], client: Client, ns: str, ids: list[int]
) -> None:
    pc = cache_of(models.tiny_llama(seed=77), local_bytes=0)
    pc.get_or_prefill(ids, ns)
    want = pc._want(np.array(ids, "<u4"), ns, pc._layout())
    rows = np.zeros((2, 2, 60, 8), np.float32)
    client.store(b"\xff" + ns.encode(), rows, rows, digest="ab" * 32, scope=want.scope,
                 blocks=(16, np.frombuffer(want.blocks[1], "<u8")))  # fmt: skip
    assert pc.explain([*ids, 3], f"{ns}-b")["source"] == ns
    assert pc.get_or_prefill([*ids, 3], f"{ns}-b")[0].offset == 61
    assert pc.stats()["last"]["source"] == ns


# --- lazy caches ------------------------------------------------------------------------------------------------------


def test_a_lazy_cache_can_be_copied_and_put(cache_of: Callable[..., PionPromptCache], ns: str, ids: list[int]) -> None:
    pc = cache_of(models.tiny_llama(seed=78))
    truth = words(pc.get_or_prefill(ids, ns))
    for copied in (copy.deepcopy, lambda cache: [copy.copy(layer) for layer in cache]):
        lazy = pc.lazy(ids, ns)
        other = copied(lazy)
        assert words(other) == words(lazy) == truth
        assert [type(layer).__module__ for layer in other] == ["mlx_lm.models.cache"] * 2
    assert pc.put(pc.lazy(ids, ns), ids, f"{ns}-put") is True
    assert words(pc.get_or_prefill(ids, f"{ns}-put")) == truth


# --- arguments, and what is said --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"port": "x"}, TypeError, "port must be an int, not str"),
        ({"port": 1 << 20}, ValueError, "port must be 0 to 65535"),
        ({"host": 5}, TypeError, "host must be a str"),
        ({"vquant": 8}, TypeError, "vquant must be a str"),
        ({"checkpoints": "a"}, ValueError, "checkpoints must be a positive number of tokens.*not 'a'"),
        ({"checkpoints": [1.5]}, ValueError, "checkpoints must be"),
        ({"prefill_chunk_size": "x"}, TypeError, "prefill_chunk_size must be"),
        ({"admission_threshold": None}, TypeError, "admission_threshold must be an int"),
        ({"wait": "x"}, TypeError, "wait must be a number of seconds, or None"),
        ({"wait": -1}, ValueError, "wait must be a number of seconds"),
        ({"scope": b"x"}, TypeError, "scope must be a str"),
        ({"local_bytes": "1"}, TypeError, "local_bytes must be an int"),
    ],
)
def test_arguments_of_other_types_are_refused_by_name(options: dict[str, Any], error: Any, text: str) -> None:
    with pytest.raises(error, match=text):
        PionPromptCache(**options)


def test_what_cannot_be_stored_or_asked_for_is_named(
    cache_of: Callable[..., PionPromptCache], ns: str, ids: list[int]
) -> None:
    pc = cache_of(models.tiny_llama(), wait=None)
    assert pc.get_or_prefill(ids, ns)[0].offset == 60
    for call, error, text in (
        (lambda: pc.put(caches.new_cache(pc.model), ids, ns), ValueError, "slot 0 is empty"),
        (lambda: pc.put(None, ids, ns), TypeError, "a prompt cache is a list, not NoneType"),
        (lambda: pc.lookup(b"x"), TypeError, "a namespace is a str, not bytes"),
        (lambda: pc.explain(ids, b"x"), TypeError, "a namespace is a str, not bytes"),
        (lambda: pc.prepare("a", "b", "c", ns), TypeError, r"a tokenizer with encode\(...\) is needed first, not str"),
        (lambda: pc.get_or_prefill(ids, ns, checkpoints="a"), ValueError, "checkpoints must be"),
    ):
        with pytest.raises(error, match=text):
            call()


def test_nan_is_reported_as_nan(
    cache_of: Callable[..., PionPromptCache], ns: str, ids: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    model = models.tiny_llama(seed=79)
    weight = model.layers[1].self_attn.v_proj.weight
    model.layers[1].self_attn.v_proj.weight = weight * float("nan")
    pc = cache_of(model, vquant="int8")
    pc.get_or_prefill(ids, ns)
    assert (pc.store_errors, pc.lookup(ns)) == (1, False)
    assert any("row 0 of layer 1 of V holds NaN" in text for text in warnings_of(caplog))


def test_a_peer_that_does_not_speak_resp_is_an_outage(
    ns: str, ids: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            with contextlib.suppress(OSError):
                while True:
                    peer, _ = listener.accept()
                    peer.recv(1 << 16)
                    peer.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                    peer.close()

        threading.Thread(target=answer, daemon=True).start()
        with PionPromptCache(models.tiny_llama(), port=listener.getsockname()[1]) as pc:
            assert pc.get_or_prefill(ids, ns)[0].offset == 60
            assert pc.lookup(ns) is False
            assert pc.outages >= 2
        listener.shutdown(socket.SHUT_RDWR)
    assert any("does not speak RESP" in text for text in warnings_of(caplog))


def test_a_prefix_that_cannot_be_mapped_is_named(client: Client, ns: str) -> None:
    for call in (client.map, client.fetch):
        with pytest.raises(PrefixMissError, match=f"prefix '{ns}': "):
            call(ns)
    begun = ["KV.PREFIX.REGISTER", ns, 16, "fp32", "ROWS", 5, "LAYERS", 2]
    assert client.call(*begun) == "OK"
    for call in (client.map, client.fetch):
        with pytest.raises(PrefixMissError, match=f"prefix '{ns}': incomplete"):
            call(ns)


FEW = """
import logging, os, resource, sys
from tests.support import models
from pion import Client, PionPromptCache
from pion.client.errors import LaneError
logging.basicConfig(stream=sys.stdout, format="%(message)s")
port, ns, ids = int(sys.argv[1]), sys.argv[2], list(range(1, 60))
pc = PionPromptCache(models.tiny_llama(), port=port, local_bytes=0)
pc.get_or_prefill(ids, ns)
client = Client(host="127.0.0.1", port=port)
client.ping()
resource.setrlimit(resource.RLIMIT_NOFILE, (150, 150))
held = []
try:
    while True:
        held.append(os.open("/dev/null", 0))
except OSError:
    pass
for room in range(2):
    print(room, pc.get_or_prefill(ids, ns)[0].offset, pc.hits, pc.lanes.used["tcp"])
    try:
        client.map(ns)
    except LaneError as error:
        print("map:", error)
    pc.lanes._refused_until = 0
    os.close(held.pop())
"""


def test_without_a_free_descriptor_rows_come_over_the_connection(server: Any, ns: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FEW, str(server.port), ns],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([os.getcwd(), *filter(None, sys.path)])},
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    lines = done.stdout.splitlines()
    assert {"0 59 1 1", "1 59 2 2"} <= set(lines)
    assert sum("no file is mapped (" in line and "descriptor" in line for line in lines) == 2
    assert sum(line.startswith("map: ") and "descriptor" in line for line in lines) == 2
