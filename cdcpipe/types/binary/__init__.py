r"""A value in binary form -> its text: what a type's send function wrote -> what its output function prints.

The text is that of a session with the settings that cdcpipe pins: client_encoding UTF8, DateStyle ISO, TimeZone UTC,
IntervalStyle postgres, bytea_output hex, extra_float_digits 1 or more. `decoder.py` finds the function of a type in the table
of types. The other modules have these functions, by kind of type. Each function is pure: no I/O, no catalog, no state.

Whatever the bytes are, a function returns a text or raises `ProtocolError`; for a read past the end it may also raise
`struct.error` or `IndexError`, which `ValueDecoder` turns into a `ProtocolError`. A function compares counts and lengths with the
bytes that are there before it believes them. A text ends at the size at which the server gives up as well. Errors hold no values.

Where the server's versions differ, the newer one is followed: a ``"char"`` beyond ASCII is an escape (``\351``), as since
PostgreSQL 16. The largest and the smallest interval are ``infinity`` and ``-infinity``, as since PostgreSQL 17.
Source: the types' send and output functions, src/backend/utils/adt/*.c.
"""
