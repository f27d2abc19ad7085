"""Entries, prefixes, sessions and the keyspace: state and durability, no sockets."""
