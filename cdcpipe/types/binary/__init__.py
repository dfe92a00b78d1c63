r"""Turns values in binary form (written by a type's send function) into text (as printed by its output function).

The text is that of a session with the settings that cdcpipe pins: client_encoding UTF8, DateStyle ISO, TimeZone UTC,
IntervalStyle postgres, bytea_output hex, extra_float_digits 1 or more. `decoder.py` finds the function of a type in the table
of types. The other modules have these functions, by kind of type. Each function is pure: no I/O, no catalog, no state.

For any bytes, a function returns a text or raises `ProtocolError`. For a read past the end it may also raise `struct.error` or
`IndexError`, which `ValueDecoder` turns into a `ProtocolError`. A function checks counts and lengths against the available bytes
before it uses them. The size of a text has the server's limit. Errors contain no values.

Where the server's versions differ, the newer one is followed: a ``"char"`` beyond ASCII is an escape (``\351``), as since
PostgreSQL 15. The largest and the smallest interval are ``infinity`` and ``-infinity``, as since PostgreSQL 17.
Source: the types' send and output functions, src/backend/utils/adt/*.c.
"""
