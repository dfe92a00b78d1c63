"""The work of ``cdcpipe``'s subcommands, without the command line. Each module has the name of its subcommand."""
