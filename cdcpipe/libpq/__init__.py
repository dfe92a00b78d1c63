"""Everything that touches psycopg: connections to the server, with deadlines, and errors of this program's own."""
