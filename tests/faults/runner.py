"""A process under the shim that plays histories on a store and reads what is left of them.

    LD_PRELOAD=shim.so python -m tests.faults.runner shim.so

Jobs come as lines of JSON, answers go out as lines of JSON. Each job runs in a fork, so that a kill costs milliseconds:

* play: steps (RESP frames, base64) on a store in a directory, with a fault armed -> the replies that came, and how many
  calls were counted.
* read: what a start finds in a directory, as `snapshot` says it.
"""

from __future__ import annotations

import base64
import ctypes
import json
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Any

from pion._core import stream
from pion.errors import StartupError
from pion.store import index, layout
from pion.store.engine import Engine
from tests.support.door import Door

STREAM_MIN = 1024  # so that small stores can be streamed ones


def snapshot(engine: Engine, namespaces: list[bytes]) -> dict[str, Any]:
    """Prefixes by row, keys by value, and the figures a start already tells.

    A prefix is None or {fmt, hit, rows: {"side.layer.row": hex}}; a key is [value, has a time to live].
    """
    prefixes: dict[str, Any] = {}
    figures = engine.info()
    for ns in namespaces:
        entry = engine._store.get(layout.PREFIX + ns)
        if entry is None:
            prefixes[ns.decode()] = None
            continue
        held: dict[str, str] = {}
        about = None
        for side, sid in enumerate((ns + b"_pk", ns + b"_pv")):
            about = entry.sides[side] or about
            rows = entry.rows
            assert rows is not None
            for layer in range(rows.layers(side)):
                for row in range(rows.tokens(side, layer)):
                    if rows.covers(side, layer, row, row + 1):
                        body = engine.v_fetch_range(sid, layer, row, row + 1)
                        assert body is not None
                        held[f"{side}.{layer}.{row}"] = body.tobytes().hex()
        assert about is not None
        prefixes[ns.decode()] = {"fmt": about.fmt, "hit": bool(engine.lookup(ns)), "rows": held}
    ks = engine.keyspace
    keys = {key.decode(): [bytes(ks.get(0, key)).hex(), ks.expire_at(0, key) > 0] for key in ks.keys(0)}
    return {"prefixes": prefixes, "keys": keys, "quarantined": figures["vstore_quarantined"], "info": figures}


def _play(job: dict[str, Any], shim: ctypes.CDLL, out: Any) -> None:
    root = Path(job["dir"])
    os.environ["TZ"] = "UTC"
    shim.fault_root(os.fsencode(root))
    if job.get("log"):
        shim.fault_log(os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600))
    shim.fault_arm(job.get("mode", 0), ctypes.c_long(job.get("at", -1)), job.get("errno", 0))
    try:
        door = Door(directory=root, stream_min=STREAM_MIN, appendfsync=job.get("policy", "everysec"))
    except StartupError as error:  # a refusal that says why
        print(json.dumps({"refused": str(error)}), file=out, flush=True)
        return
    print(json.dumps({"opened": True}), file=out, flush=True)
    for number, step in enumerate(job["steps"]):
        shim.fault_mark(ctypes.c_long(number))
        reply = door(base64.b64decode(step))
        if not reply:  # the log could not be written: nothing can be said about the command
            door.reconnect()
        print(json.dumps({"step": number, "reply": base64.b64encode(reply).decode()}), file=out, flush=True)
    shim.fault_mark(ctypes.c_long(len(job["steps"])))
    if job.get("close"):
        door.close()
    stream.drain()
    print(json.dumps({"count": shim.fault_count()}), file=out, flush=True)


def _read(job: dict[str, Any], out: Any) -> None:
    if job.get("power_cut"):
        index.boot_id = lambda: b"another boot"  # type: ignore[assignment]
    engine = Engine(job["dir"], ticker=False)
    for thread in engine._threads:
        thread.join()  # it takes in files the index did not know
    found = snapshot(engine, [ns.encode() for ns in job["namespaces"]])
    if job.get("close", True):
        engine.close()
    print(json.dumps(found), file=out, flush=True)


def _forked(job: dict[str, Any], shim: ctypes.CDLL) -> dict[str, Any]:
    """Lines the child wrote, and how it ended."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        code = 1
        try:
            with os.fdopen(write, "w") as out:
                if job["do"] == "play":
                    _play(job, shim, out)
                else:
                    _read(job, out)
            code = 0
        except BaseException as error:
            with os.fdopen(os.open(job["dir"] + ".error", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
                import traceback

                traceback.print_exception(error, file=file)
        finally:
            os._exit(code)
    os.close(write)
    with os.fdopen(read) as file:
        lines = [json.loads(line) for line in file]
    _, status = os.waitpid(pid, 0)
    return {
        "lines": lines,
        "killed": os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL,
        "code": os.waitstatus_to_exitcode(status),
    }


def main() -> None:
    logging.disable(logging.CRITICAL)
    shim = ctypes.CDLL(sys.argv[1])
    for line in sys.stdin:
        print(json.dumps(_forked(json.loads(line), shim)), flush=True)


if __name__ == "__main__":
    main()
