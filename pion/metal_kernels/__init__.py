"""Stored rows to arrays on the GPU: they cross the bus, like the wire, in their stored bytes.

The kernels are `*.metal` files: bodies for ``mx.fast.metal_kernel``, which makes the function around them. `table` says
for each its inputs, template arguments, grid and portable twin; `portable` holds the twins, in plain MLX operations for
GPUs without Metal; `run` chooses and calls. The numbers are those of `pion.ref`.

mlx is imported inside functions only.
"""

from pion.metal_kernels.run import BACKENDS, angles, backend, decode
from pion.metal_kernels.table import KERNELS, Kernel, Rows, kernel_of

__all__ = ["BACKENDS", "KERNELS", "Kernel", "Rows", "angles", "backend", "decode", "kernel_of"]
