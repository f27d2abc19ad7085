"""Kernels for Metal GPUs: stored rows to arrays, so that they cross the bus, like the wire, in their stored bytes; and
attention over prefixes, in arrays or as they are stored.

The kernels are `*.metal` files: bodies for ``mx.fast.metal_kernel``, which makes the function around them. Each has a
twin in plain MLX operations, for machines without Metal. For decoding, `table` says for each kernel its inputs,
template arguments, grid and twin; `portable` holds the twins; `run` chooses and calls. For attention, `bodies` lists
the kernels and `device` runs them; `attention`, `attention_blocks` and `attention_rows` are the functions,
`attention_ops` has the twins, `fits` tells what only they take. The numbers are those of `pion.ref`.

mlx is imported inside functions only.
"""

from pion.metal_kernels.attention import dense, fused, gather, gather_blocks, logsum, merge
from pion.metal_kernels.attention_blocks import SELECTORS, Stats, block_stats, select
from pion.metal_kernels.attention_rows import block_angles, dense_rows, stored_bytes
from pion.metal_kernels.fits import unfit
from pion.metal_kernels.run import BACKENDS, angles, backend, decode
from pion.metal_kernels.table import KERNELS, Kernel, Rows, kernel_of

__all__ = [
    "BACKENDS",
    "KERNELS",
    "SELECTORS",
    "Kernel",
    "Rows",
    "Stats",
    "angles",
    "backend",
    "block_angles",
    "block_stats",
    "decode",
    "dense",
    "dense_rows",
    "fused",
    "gather",
    "gather_blocks",
    "kernel_of",
    "logsum",
    "merge",
    "select",
    "stored_bytes",
    "unfit",
]
