"""No test here has a server or a Spark session: one that asks for either fails, and says where it belongs."""

from collections.abc import Callable, Iterator

import pytest

from support.forked_commands import ForkedCommands

FOLDERS = {
    "server": ("pg", "any_pg", "pg14", "pg15", "pg16", "pg17", "pg18", "database", "shell"),
    "spark": ("spark",),
}
"""Fixtures that are not for unit tests, by the folder of the tests that they are for."""


@pytest.fixture(scope="session")
def commands() -> Iterator[ForkedCommands]:
    """The command lines, without the time that Python takes to import them."""
    with ForkedCommands() as made:
        yield made


def refusal(fixture: str, folder: str) -> Callable[[], None]:
    """Return a fixture of this name that stands here in the place of the real one."""

    @pytest.fixture(name=fixture, scope="session")
    def refuse() -> None:
        pytest.fail(f"a test in tests/unit asks for the fixture {fixture!r}: it belongs in tests/{folder}", pytrace=False)

    return refuse


# pytest finds fixtures among a module's attributes.
globals().update({f"no_{fixture}": refusal(fixture, folder) for folder, names in FOLDERS.items() for fixture in names})
