"""Checks what a test needs on the machine. If it is missing, the test is skipped with the reason; if CI is set, it fails."""

import os

import postgres
import pytest


def missing(reason: str) -> None:
    """Skip the running test with this reason, or fail it if CI is set."""
    if os.environ.get("CI"):
        pytest.fail(f"{reason} (nothing may be missing in CI)", pytrace=False)
    pytest.skip(reason)


def need(version: str) -> None:
    """Skip the test unless this server version is installed. For tests that create their own cluster."""
    reason = postgres.missing_reason(version)
    if reason:
        missing(reason)
