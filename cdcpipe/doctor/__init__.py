"""What would go wrong with a stream, found before it does: facts are asked of the server, and each check judges them.

``survey`` asks, and changes nothing. The checks are functions from facts to verdicts, without I/O. ``findings`` has the result.
"""
