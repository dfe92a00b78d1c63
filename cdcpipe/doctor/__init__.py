"""Finds problems of a stream before they occur: the doctor asks the server for facts, and checks judge these facts.

``survey`` asks for the facts, and changes nothing. Each check is a function from facts to verdicts, without I/O. ``findings``
defines the result.
"""
