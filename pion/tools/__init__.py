"""The offline commands: `pion check DIR` verifies a data directory, `pion inspect FILE` prints one file of it.

Both only read. They know the files through the same compiled readers as the server, and need neither numpy nor mlx.
"""
