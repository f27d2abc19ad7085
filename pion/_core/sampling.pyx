# cython: language_level=3, freethreading_compatible=False, binding=True, embedsignature=True
"""What identifies the weights of a model, read in place: the names of its arrays, and bytes sampled from each."""

from cpython.buffer cimport PyBUF_C_CONTIGUOUS, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.string cimport memcpy

__all__ = ["parameters", "samples"]


def parameters(root, kind):
    """The arrays of a tree of dicts and lists.

    Args:
        root: a dict or a list, such as an mlx module.
        kind: the class of arrays.

    Returns:
        A list of (dotted name, array), in the order of the names. An array whose own key begins with an underscore is
        none of them: that is mlx's rule for what is no parameter.
    """
    cdef list stack = [("", root)], found = []
    cdef str name, path
    while stack:
        name, node = <tuple> stack.pop()
        for key, item in node.items() if isinstance(node, dict) else enumerate(node):
            if isinstance(item, kind):
                own = str(key)
                if not own.startswith("_"):
                    found.append((name + "." + own if name else own, item))
            elif isinstance(item, (dict, list)):
                path = str(key)
                stack.append((name + "." + path if name else path, item))
    found.sort(key=_name)
    return found


cdef _name(tuple pair):
    return pair[0]


def samples(list buffers, Py_ssize_t count, Py_ssize_t nbytes):
    """Bytes from evenly spaced places of each buffer, the first and the last ones among them.

    Args:
        buffers: C-contiguous.
        count: places, at least 2.
        nbytes: at each place. A buffer that is shorter is taken `count` times as a whole.

    Returns:
        A list of bytes, one for each buffer.

    Raises:
        BufferError: a buffer is not contiguous.
        ValueError: fewer than two places, or a negative number of bytes.
    """
    cdef Py_buffer view
    cdef Py_ssize_t last, each, i
    cdef bytes sample
    cdef char *out
    cdef list found = []
    if count < 2 or nbytes < 0:
        raise ValueError("at least two places, of no negative number of bytes")
    for buffer in buffers:
        PyObject_GetBuffer(buffer, &view, PyBUF_C_CONTIGUOUS)
        try:
            last = view.len - nbytes if view.len > nbytes else 0
            each = nbytes if view.len > nbytes else view.len
            sample = PyBytes_FromStringAndSize(NULL, count * each)
            out = PyBytes_AS_STRING(sample)
            for i in range(count):
                memcpy(out + i * each, <const char *> view.buf + last * i // (count - 1), each)
        finally:
            PyBuffer_Release(&view)
        found.append(sample)
    return found
