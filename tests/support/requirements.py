"""What a test needs of the machine: without it the test is skipped, with the reason; where CI is set it fails."""

import os

import postgres
import pytest


def missing(reason: str) -> None:
    """Skip the test that runs."""
    if os.environ.get("CI"):
        pytest.fail(f"{reason} (nothing may be missing in CI)", pytrace=False)
    pytest.skip(reason)


def need(version: str) -> None:
    """Go on only where this server version is there; for tests that make a cluster of their own."""
    reason = postgres.missing_reason(version)
    if reason:
        missing(reason)
