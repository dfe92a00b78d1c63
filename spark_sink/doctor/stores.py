"""Checks an object store: can it be reached, do its conditional writes never overwrite an object, and does it delete objects."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cdcpipe.doctor.findings import Verdict, error, ok
from spark_sink.doctor.directories import judge_clock
from spark_sink.files import clock as files_clock
from spark_sink.files import places
from spark_sink.files.places import StorageError

__all__ = ["Store", "clock", "conditional_writes", "probe"]

_logger = logging.getLogger(__name__)

_HINT = "check bucket, credentials and network"


@dataclass(frozen=True, slots=True)
class Store:
    """The facts about a store. ``problem`` is None if there is none. The clock is None if there is a problem."""

    name: str
    problem: tuple[str, str] | None
    """The message and the hint."""
    clock_ahead_s: float | None


def probe(root: Path) -> Store:
    """Test a conditional write, and write and delete another object to see the store's time.

    The first test leaves an object behind, which `run` uses for the same test.
    """
    name = places.name(root)
    try:
        places.check_store(root)
        return Store(name, None, files_clock.ahead_s(root / "_cdcpipe"))
    except StorageError as ex:
        return Store(name, (ex.message, ex.hint or _HINT), None)
    except Exception as ex:  # the libraries of stores raise errors of many types
        _logger.info("the store", exc_info=True)
        said = str(ex).strip().partition("\n")[0] or type(ex).__name__
        return Store(name, (f"{name} can't be reached: {said}", _HINT), None)


def conditional_writes(found: Store) -> Iterator[Verdict]:
    """Judge whether the store can hold Delta tables."""
    if found.problem is None:
        yield ok(f"{found.name} can be reached, and its conditional writes never overwrite; it deletes objects")
    else:
        message, hint = found.problem
        yield error(message, "the tables need a store whose conditional writes never overwrite an object, and that deletes", hint)


def clock(found: Store) -> Iterator[Verdict]:
    """Judge whether the store's clock agrees with this machine's."""
    if found.clock_ahead_s is not None:
        yield from judge_clock("the store", found.clock_ahead_s)
