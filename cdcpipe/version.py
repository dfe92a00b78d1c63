"""The version of this program."""

from __future__ import annotations

__all__ = ["own_version"]


def own_version() -> str:
    """Return the version that is installed; ``unknown`` where the sources are used without an installation."""
    from importlib.metadata import PackageNotFoundError, version  # not above: it takes longer than many commands have

    try:
        return version("cdcpipe")
    except PackageNotFoundError:
        return "unknown"
