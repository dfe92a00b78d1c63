"""Shared code of the tests: starts the programs under test, and creates their input."""
