"""From the pipe to sealed segments, and when to start the streamer again."""
