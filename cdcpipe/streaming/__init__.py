"""The loop that moves records from the server to the pipe, and its parts."""
