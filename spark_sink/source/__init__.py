"""From segments to rows: the "cdcpipe" data source."""
