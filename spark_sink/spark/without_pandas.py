"""Keeps pandas out of the processes of a command. pyarrow and pyspark import it when they need not: 0.2 s of CPU time in each.

    without_pandas.want()       # a command, at its start: for its process and Spark's Python workers
    without_pandas.apply()      # in each of these processes, before the first use of pyarrow or py4j

pyarrow imports pandas with the first scalar or array that it makes from Python's values, to recognise pandas' own. pyspark imports
it, and `pyspark.testing`, with the first argument for the JVM, to find out whether numpy is installed. None of our code has values
of pandas. A program that imports `spark_sink` may have some, so this is for commands alone.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

__all__ = ["apply", "want"]

_VARIABLE: Final = "CDCPIPE_WITHOUT_PANDAS"


def want() -> None:
    """Let `apply` work in this process, and in the processes that it starts."""
    os.environ[_VARIABLE] = "1"


def apply() -> None:
    """Let pyarrow and pyspark do without pandas in this process, if `want` was called here or in the process that started it.

    Then pyarrow does not recognise pandas' values in what it is given. Imports of pandas, and conversions to it, work as before.
    """
    if _VARIABLE not in os.environ or "pandas" in sys.modules:
        return
    import pyarrow as pa

    hidden = _Hidden()
    sys.meta_path.insert(0, hidden)
    try:
        # pyarrow looks for pandas once for each of its two layers.
        pa.scalar(0)
        pa.Array.from_buffers(pa.int64(), 0, [None, pa.py_buffer(b"")]).to_numpy()
    finally:
        sys.meta_path.remove(hidden)
    if "pyspark" in sys.modules:
        from pyspark.sql.types import NumpyArrayConverter, NumpyScalarConverter

        NumpyArrayConverter.can_convert = _is_vector
        NumpyScalarConverter.can_convert = _is_number


def _is_vector(_converter: Any, value: Any) -> bool:
    import numpy as np

    return isinstance(value, np.ndarray) and value.ndim == 1


def _is_number(_converter: Any, value: Any) -> bool:
    import numpy as np

    return isinstance(value, np.generic)


class _Hidden:
    """A finder for ``sys.meta_path`` that lets imports of pandas fail."""

    def find_spec(self, name: str, _path: Sequence[str] | None = None, _target: ModuleType | None = None) -> ModuleSpec | None:
        if name == "pandas":
            raise ModuleNotFoundError("pandas is hidden", name=name)
        return None
