# cython: language_level=3, freethreading_compatible=False
# cython: boundscheck=False, wraparound=False, initializedcheck=False, cdivision=True
"""A connection of the plane, as commands see it."""

cimport cython
from libc.stdlib cimport free

from pion._core.stream cimport sink_unref

__all__ = ["Conn"]


@cython.final
@cython.no_gc_clear
cdef class Conn:
    """One connection: what commands may know and change about it.

    Attributes:
        id: never reused within a server's life.
        fd: descriptor, -1 without one or after the end.
        peer, laddr: "address:port" of both ends, or a path.
        db, proto: selected database; RESP version, 2 or 3.
        authenticated: before that, only small commands and few unread replies are accepted.
        fast: False sends every frame to the handler, in order.
        user, name, lib_name, lib_ver: filled in by commands.
        data: state of command families.
        created, last_active: seconds of `time.monotonic`.
        closing: no further command will run.
        output_bytes, input_bytes: memory held for unread replies, for a half-received command (0 while a mover has it).
        wants_input: (memory connections) False while feeding more would only pile up.
    """

    def __cinit__(self):
        self.name = ""
        self.lib_name = ""
        self.lib_ver = ""
        self.data = {}
        self.inbox = []

    def __dealloc__(self):
        if self.c != NULL:
            sink_unref(self.c.sink)
            free(self.c)

    def __repr__(self):
        return f"<Conn {self.c.id} {self.peer}>"

    @property
    def id(self):
        return self.c.id

    @property
    def fd(self):
        return self.c.fd

    @property
    def db(self):
        return self.c.db

    @db.setter
    def db(self, int value):
        if not 0 <= value <= 255:
            raise ValueError("database index out of range")
        self.c.db = value

    @property
    def proto(self):
        return self.c.proto

    @proto.setter
    def proto(self, int value):
        if value != 2 and value != 3:
            raise ValueError("RESP version is 2 or 3")
        self.c.proto = value

    @property
    def authenticated(self):
        return bool(self.c.authed)

    @authenticated.setter
    def authenticated(self, bint value):
        self.c.authed = value
        conn_set_limits(self.c)

    @property
    def fast(self):
        return bool(self.c.fast)

    @fast.setter
    def fast(self, bint value):
        self.c.fast = value

    @property
    def created(self):
        return self.c.created_ns / 1e9

    @property
    def last_active(self):
        return self.c.active_ns / 1e9

    @property
    def cmd_count(self):
        return self.c.commands

    @property
    def net_in(self):
        return self.c.net_in

    @property
    def net_out(self):
        return self.c.net_out

    @property
    def last_cmd(self):
        """Lower-case name of the last command, b"" before the first."""
        if self.c.last_cmd != NULL:
            return <bytes>self.c.last_cmd
        return self.last or b""

    @last_cmd.setter
    def last_cmd(self, bytes value):
        self.c.last_cmd = NULL
        self.last = value

    @property
    def closing(self):
        return self.c.closing != CLOSE_NO or self.c.where == AT_END or self.c.kill != 0

    @property
    def closed(self):
        """The connection has ended."""
        return self.c.where == AT_END

    @property
    def pending(self):
        """A reply is due through `Plane.resume`, or a sink through `Plane.place`."""
        return bool(self.c.pending) or self.c.waiting == WAIT_PLACE

    @property
    def output_bytes(self):
        return self.c.out.ram if self.c.where == AT_HOME else 0

    @property
    def input_bytes(self):
        return self.c.cap + self.c.body_got if self.c.where == AT_HOME else 0

    @property
    def wants_input(self):
        return self.c.where == AT_HOME and conn_wants_input(self.c)
