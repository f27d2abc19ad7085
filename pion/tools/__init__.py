"""The commands of `pion` that work on stored data: a directory, a file, or what a server holds."""
