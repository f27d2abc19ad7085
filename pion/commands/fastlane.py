"""Requests of the binary lane as commands, so that they meet the same checks, code and counters as over RESP."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from pion import limits
from pion.commands.commits import settled
from pion.wire.fastlane import HEADER, Command, Request, Status, parse_fused
from pion.wire.resp import Err

if TYPE_CHECKING:
    from pion.commands.dispatch import Dispatcher

_FUSED: Final = b"ATTEND.PREFIX.QUERY_FUSED"
_COLD: Final = b"COLDMISS"
_NAMES: Final[dict[int, bytes]] = {Command.PING: b"ping", Command.AUTH: b"auth", Command.QUERY_FUSED: _FUSED.lower()}

Answer = tuple[Status, bytes]


@dataclass(slots=True)
class Figures:
    """What INFO says about the lane.

    Attributes:
        port: where it listens; 0 = there is none.
        clients: connections now.
        requests: answered since the start, of any kind.
        queries: answered with an attention.
        misses, errors, coldmisses: the others, by status; pings and logins are none of these.
        garbage: connections closed because they did not speak the lane's protocol.
    """

    port: int = 0
    clients: int = 0
    requests: int = 0
    queries: int = 0
    misses: int = 0
    errors: int = 0
    coldmisses: int = 0
    garbage: int = 0

    def lines(self) -> dict[str, int]:
        """Their names in INFO."""
        return {
            "binary_port": self.port,
            "binary_requests": self.requests,
            "binary_queries": self.queries,
            "binary_misses": self.misses,
            "binary_errors": self.errors,
            "binary_coldmisses": self.coldmisses,
            "binary_garbage": self.garbage,
        }


class BinaryCalls:
    """Answers requests.

    Args:
        dispatcher: of the server.
    """

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._server = dispatcher.server

    @staticmethod
    def name(command: int) -> bytes:
        """What CLIENT LIST calls it."""
        return _NAMES.get(command, b"binary|0x%02x" % command)

    async def answer(self, conn: Any, request: Request) -> Answer:
        """Status and body of the response."""
        status, body = await self._answer(conn, request)
        figures = self._server.binary
        figures.requests += 1
        if status is Status.MISS:
            figures.misses += 1
        elif status is Status.ERROR:
            figures.errors += 1
        elif status is Status.COLDMISS:
            figures.coldmisses += 1
        elif request.command == Command.QUERY_FUSED:
            figures.queries += 1
        return status, body

    async def _answer(self, conn: Any, request: Request) -> Answer:
        command = request.command
        if command == Command.AUTH:
            if self._dispatcher.auth.open:
                return Status.MISS, b""
            return await self._run(conn, [b"AUTH", bytes(request.body)])
        if not conn.authenticated:
            return Status.ERROR, b""  # before the login nothing is told, not even what there is
        if command == Command.PING:
            return await self._run(conn, [b"PING"])
        if command == Command.QUERY_FUSED:
            return await self._fused(conn, request.body)
        return Status.MISS, b""

    async def _fused(self, conn: Any, body: bytes | bytearray) -> Answer:
        call = parse_fused(body)
        if call is None:
            return Status.MISS, b""
        attention = self._server.attention
        if attention.mode == "off":
            return Status.ERROR, b""
        if len(call.q) + HEADER.size > limits.FASTLANE_REPLY:
            cold = not attention.autowarm and attention.lookup(call.sid, call.layer) == "COLD"
            return (Status.COLDMISS if cold else Status.ERROR), b""
        numbers = (b"%d" % number for number in (call.q_heads, call.dim, call.suffix, call.kv_heads))
        arrays = call.q, call.k_suf, call.v_suf, call.head_map  # views: nothing is copied in the plane's thread
        return await self._run(conn, [_FUSED, call.sid, b"%d" % call.layer, *numbers, *arrays, b"%d" % call.window])

    async def _run(self, conn: Any, argv: list[Any]) -> Answer:
        value = await settled(self._dispatcher(conn, argv))
        if type(value) is Err:
            return (Status.COLDMISS if value.value.startswith(_COLD) else Status.ERROR), b""
        return Status.OK, value if argv[0] is _FUSED else b""
