"""What holds for all tests. The servers and the Spark session that they share are in support/fixtures.py."""

import pytest
from hypothesis import HealthCheck, settings

# An assertion that fails there says what it compared, as in a test.
pytest.register_assert_rewrite("support")
pytest_plugins = ["support.fixtures"]

# Machines are noisy: how long an example takes says nothing.
settings.register_profile("cdcpipe", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("cdcpipe")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with what takes long, whatever the order otherwise: of several processes none is left alone with it at the end."""
    items.sort(key=lambda item: item.get_closest_marker("spark") is None)
