"""From the pipe to sealed segments."""
