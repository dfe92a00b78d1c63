"""What each subcommand of ``cdcpipe`` does, without its command line: one module for each, named as the subcommand is."""
