"""The streaming replication protocol: CopyData messages, commands, positions, and the connection."""
