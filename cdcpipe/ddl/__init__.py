"""DDL capture: the event triggers that write what DDL does into the stream (capture.sql), and the format of their messages."""
