"""The names of servers on a command line."""

import pytest

from cdcpipe.system_ids import parse_system, parse_system_id


def test_the_forms_that_the_server_gives() -> None:
    assert parse_system("18446744073709551615/4294967295") == "18446744073709551615/4294967295"
    assert parse_system("007/01") == "7/1"
    assert parse_system_id("7711155989881817539") == "7711155989881817539"


@pytest.mark.parametrize("text", ["", "abc", "0", "-1", "1.5", "1/1", "18446744073709551616", "\u0661", "9" * 5000])
def test_other_texts_are_no_system_identifiers(text: str) -> None:
    with pytest.raises(ValueError, match="system identifier"):
        parse_system_id(text)
