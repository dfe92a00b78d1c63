"""The parts of psycopg that are used here: ``pq``, which is libpq, ``errors`` and ``conninfo``.

Python runs a package's own code before it imports a part of it. psycopg's own code imports the conversion of each type and much
else, which is a fifth of a short command's start (docs/decisions/0083). So this module enters the package in ``sys.modules``, but
its code runs only when anyone asks the package for something else:

    from cdcpipe.libpq.driver import pq     # psycopg.pq; psycopg itself has not run
    import psycopg                          # still not
    psycopg.connect                         # now it has
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from psycopg import conninfo, errors, pq

__all__ = ["conninfo", "errors", "pq"]


class _Deferred(ModuleType):
    """A package whose code has not run. It runs when somebody asks for an attribute that is not there yet."""

    is_importing_parts = True

    def __getattr__(self, name: str) -> Any:
        if self.is_importing_parts:
            raise AttributeError(name)
        assert self.__spec__ is not None
        assert self.__spec__.loader is not None
        self.__class__ = ModuleType  # type: ignore[assignment] # from now on it is an ordinary module
        self.__spec__.loader.exec_module(self)
        return getattr(self, name)


def _import_parts() -> list[ModuleType]:
    """Import the parts without psycopg's own code, unless that has run already."""
    spec = importlib.util.find_spec("psycopg") if "psycopg" not in sys.modules else None
    if spec is not None:
        package = importlib.util.module_from_spec(spec)
        package.__class__ = _Deferred
        sys.modules["psycopg"] = package
    try:
        return [importlib.import_module(f"psycopg.{name}") for name in ("pq", "errors", "conninfo")]
    finally:
        _Deferred.is_importing_parts = False  # also after an error: others still get the whole package, or its own error


if not TYPE_CHECKING:
    pq, errors, conninfo = _import_parts()
