# cython: language_level=3
"""The network plane. The C interface may change in a minor release."""

from pion._core.planebase cimport PlaneBase


cdef class Plane(PlaneBase):
    pass
