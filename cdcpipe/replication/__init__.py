"""The streaming replication protocol: the connection, commands, CopyData messages, and confirmed positions."""
