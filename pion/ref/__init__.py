"""Readable numpy twins of the compiled core: what its tests compare it with."""
