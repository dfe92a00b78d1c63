"""PostgreSQL's types: what they are called, what their values look like as bytes and as text, and which column holds them.

`table.py` says in one row for each built-in type what is done with its values. `binary/` makes texts of values in binary form.
`arrow/` makes Arrow columns of many values, in either form; it alone needs numpy and pyarrow. `pg_type.py` and `names.py` have
what the server's catalog says of built-in types. No I/O.
"""
