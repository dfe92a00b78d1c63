"""pgoutput, PostgreSQL's built-in logical decoding output plugin: its messages, read without any I/O."""
