"""Attention over stored prefixes: the K/V stay here, queries come and answers go.

`engine` keeps the K/V by session and layer and answers queries; the backends behind it compute: `numpy_ops` on a CPU,
`mlx_ops` in plain MLX operations on any device of MLX, `metal_ops` with our kernels. `choice` says which one a machine
gets. All of them give what `pion.ref.attention` gives, to the last few bits.

Nothing is imported here: a server that is never asked for attention loads neither numpy nor mlx.
"""
