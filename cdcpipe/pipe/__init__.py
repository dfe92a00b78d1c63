"""The pipe's protocol, for both of its ends: records (framing), commands on stdin, exit codes."""
