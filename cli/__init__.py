"""The command line of cdcpipe: parses options, builds a configuration, calls the core, and returns an exit code."""
