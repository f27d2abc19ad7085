"""The durable keyspace: log, snapshots, replay."""
