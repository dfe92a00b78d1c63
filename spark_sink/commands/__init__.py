"""The command line of ``cdcpipe-spark``: one module for each subcommand."""
