"""Sockets, timers and shutdown: the part of the server that runs on trio."""
