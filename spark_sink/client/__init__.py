"""Runs the ``cdcpipe`` command as a child process and reads its answers. The only folder that builds its arguments."""
