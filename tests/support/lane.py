"""KV.PREFIX.LANE and its socket, spoken by hand."""

from __future__ import annotations

import array
import socket
import struct
from typing import Any, NamedTuple

from pion.wire import raw
from tests.support.raw import Raw

U64 = struct.Struct("<QQ")


class Told(NamedTuple):
    """An answer of KV.PREFIX.LANE; a layer is (what it holds, its pieces in the file)."""

    fields: dict[str, Any]
    sides: list[list[tuple[raw.Stored, list[tuple[int, int]]]]]

    @property
    def path(self) -> str:
        return str(self.fields["socket"].decode())

    @property
    def ticket(self) -> bytes:
        return bytes(self.fields["ticket"])

    def rows(self, fd: int, side: int, layer: int) -> bytes:
        """The stored bytes of a layer."""
        with open(fd, "rb", closefd=False) as file:
            out = b""
            for offset, nbytes in self.sides[side][layer][1]:
                file.seek(offset)
                out += file.read(nbytes)
        return out


def told(answer: Any) -> Told:
    pairs = answer.items() if isinstance(answer, dict) else zip(answer[::2], answer[1::2], strict=True)
    fields = {bytes(name).decode(): value for name, value in pairs}
    sides = []
    for name in ("keys", "values"):
        flat, layers = fields[name], []
        for head, packed in zip(flat[::2], flat[1::2], strict=True):
            pieces = list(U64.iter_unpack(packed))
            layers.append((raw.parse(head, sum(nbytes for _, nbytes in pieces)), pieces))
        sides.append(layers)
    return Told(fields, sides)


def ask(conn: Raw, ns: str) -> Told:
    return told(conn.ok("KV.PREFIX.LANE", ns))


def show(path: str, ticket: bytes, timeout: float = 10.0) -> tuple[bytes, int]:
    """(answer, descriptor or -1) of the lane's socket."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(timeout)
        sock.connect(path)
        sock.sendall(ticket + b"\n")
        answer, ancillary, _, _ = sock.recvmsg(200, socket.CMSG_SPACE(16))
    fds = array.array("i")
    for level, kind, data in ancillary:
        assert (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS)
        fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    assert len(fds) <= 1
    return answer, fds[0] if fds else -1
