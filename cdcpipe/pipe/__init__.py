"""The pipe's protocol, the same code at both of its ends: framing (records), commands (stdin) and exit codes."""
