"""A command's processes do not import pandas, and a program's may use it with pyarrow as always."""

import os
import subprocess
import sys

import pytest

from support.paths import ROOT

USE = """
import sys
from pyspark.sql.types import NumpyArrayConverter, NumpyScalarConverter
from spark_sink.spark import without_pandas

without_pandas.apply()
import numpy as np, pyarrow as pa, pyarrow.compute as pc, pyarrow.dataset
array = pa.array(np.array([1, 2, 3]))
assert pc.equal(array, 2).to_numpy(zero_copy_only=False).tolist() == [False, True, False]
assert pa.table({"a": ["x", "x"]}).group_by("a").aggregate([]).num_rows == 1
arrays, numbers = NumpyArrayConverter(), NumpyScalarConverter()
assert [arrays.can_convert(each) for each in (np.zeros(2), np.zeros((2, 2)), [1], "a", np.int64(1))] == [True] + [False] * 4
assert [numbers.can_convert(each) for each in (np.int64(1), np.zeros(2), 1, None)] == [True] + [False] * 3
print("pandas" in sys.modules)

import pandas

assert pa.table({"a": [1, 2]}).to_pandas()["a"].sum() == 3
"""


@pytest.mark.parametrize(("variables", "imported"), [({"CDCPIPE_WITHOUT_PANDAS": "1"}, "False"), ({}, "True")])
def test_pandas_is_imported_only_where_nobody_said_that_it_is_not_needed(variables: dict[str, str], imported: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "CDCPIPE_WITHOUT_PANDAS"} | variables
    done = subprocess.run([sys.executable, "-c", USE], capture_output=True, text=True, cwd=ROOT, env=environment)
    assert (done.stdout.strip(), done.stderr) == (imported, "")


def test_a_command_says_it_to_the_processes_that_it_starts() -> None:
    program = "import os, spark_sink.__main__ as main; main.invoke(['--version']); print(os.environ['CDCPIPE_WITHOUT_PANDAS'])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.endswith("\n1\n"), done.stderr
