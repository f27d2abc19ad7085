"""The commands of `pion` that work on stored data.

``check``        `pion check DIR` verifies a data directory
``show``         `pion inspect FILE` prints one file of it
``portability``  `pion export` and `pion import`: a prefix to a file and back

The first two only read; they know the files through the same compiled readers as the server, and need neither numpy nor
mlx.
"""
