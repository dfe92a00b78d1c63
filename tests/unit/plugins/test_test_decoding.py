"""Options of the output plugin test_decoding."""

from __future__ import annotations

import pytest

from cdcpipe.errors import InvalidArgumentsError
from cdcpipe.plugins import load
from support.recorder import nothing


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"include-xid": "1"}, "no option 'include-xid'"),
        ({"include-xids": "maybe"}, "could not parse value 'maybe'"),
        ({"include-rewrites": "1"}, "can't be honoured"),
    ],
)
def test_options_that_are_refused(options, message):
    with pytest.raises(InvalidArgumentsError, match=message):
        load("test_decoding", options, nothing)
