"""The command line of cdcpipe: parses, builds a configuration, calls the core, returns an exit code."""
