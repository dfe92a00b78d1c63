"""PostgreSQL's types: their names, the binary and text forms of their values, and the columns that hold them. No I/O.

`table.py` has a row for each built-in type, with all rules for its values. `binary/` turns values in binary form into text.
`arrow/` turns many values, in either form, into Arrow columns; only this folder needs numpy and pyarrow. `pg_type.py` and
`names.py` have the catalog's facts about built-in types.
"""
