"""Options of the output plugin json."""

from __future__ import annotations

import pytest

from cdcpipe.errors import InvalidArgumentsError
from cdcpipe.plugins import load


def test_options_are_refused():
    with pytest.raises(InvalidArgumentsError, match="no option 'include-xids'"):
        load("json", {"include-xids": "1"}, lambda sql: [])
