"""Packed fields and members, as log records hold them."""

cpdef bytes pack_items(int kind, items)
cpdef list unpack_items(int kind, bytes payload)
