"""pgoutput's options against server versions."""

import pytest

from cdcpipe.errors import InitError
from cdcpipe.pgoutput.options import complete, setting

PROTOCOL = [
    ({}, 140000, "1"),
    ({"binary": "true"}, 140000, "1"),
    ({"messages": None}, 140000, "1"),
    ({"streaming": "on"}, 140000, "2"),
    ({"streaming": "off"}, 130000, "1"),
    ({"two_phase": "on", "streaming": "TRUE"}, 150000, "3"),
    ({"streaming": "parallel"}, 160000, "4"),
    ({"origin": "none"}, 180004, "1"),
    ({"nonsense": "x"}, 190000, "1"),
    ({"proto_version": "4"}, 180004, "4"),
    ({"proto_version": "2", "streaming": "on"}, 180004, "2"),
]


@pytest.mark.parametrize(("options", "server", "version"), PROTOCOL)
def test_the_lowest_version_that_serves(options: dict[str, str | None], server: int, version: str) -> None:
    completed = complete(options, server)
    assert completed["proto_version"] == version
    assert {**completed, **options} == completed


def test_hints_name_the_option_of_the_command_line() -> None:
    for options, named in (
        ({"two_phase": "on"}, "--two-phase (or -o two_phase)"),
        ({"proto_version": "1", "streaming": "on"}, "--proto-version (or -o proto_version)"),
    ):
        with pytest.raises(InitError) as raised:
            complete(options, 140000)
        assert named in (raised.value.hint or "")


REFUSED = [
    ({"streaming": "parallel"}, 150020, "16"),
    ({"two_phase": "on"}, 140000, "15"),
    ({"origin": "none"}, 150020, "16"),
    ({"streaming": "maybe"}, 180004, "parallel"),
    ({"origin": "on"}, 180004, "any, none"),
    ({"messages": "banana"}, 180004, "off, on"),
    ({"binary": "1"}, 180004, "off, on"),
    ({"streaming": "yes"}, 180004, "off, on, parallel"),
    ({"nonsense": "x"}, 180004, "no option 'nonsense'"),
    ({"publication_names": None}, 180004, "publication_names"),
    ({"proto_version": "4"}, 150020, "1 to 3"),
    ({"proto_version": "0"}, 180004, "1 to 4"),
    ({"proto_version": "x"}, 180004, "1 to 4"),
    ({"proto_version": "1", "streaming": "on"}, 180004, "need 2"),
]


@pytest.mark.parametrize(("options", "server", "named"), REFUSED)
def test_options_that_are_too_new_are_named(options: dict[str, str | None], server: int, named: str) -> None:
    with pytest.raises(InitError, match=named):
        complete(options, server)


@pytest.mark.parametrize(
    ("given", "read"), [("on", "on"), (None, "on"), ("FALSE", "off"), ("Parallel", "parallel"), ("0", "off"), ("yes", "on")]
)
def test_a_setting_is_read_as_by_the_server(given: str | None, read: str) -> None:
    assert setting({"streaming": given}, "streaming") == read
    assert setting({}, "streaming") == "off"
