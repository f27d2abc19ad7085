"""RESP2 and RESP3 in both directions, without I/O; server and client share it."""
