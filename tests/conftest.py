"""Settings for all tests. The shared servers and the shared Spark session are in support/fixtures.py."""

import pytest
from hypothesis import HealthCheck, settings

# A failed assertion in support/ then shows the compared values, as in a test.
pytest.register_assert_rewrite("support")
pytest_plugins = ["support.fixtures", "support.scheduling"]

# The load of the machine varies, so the duration of an example means nothing.
settings.register_profile("cdcpipe", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("cdcpipe")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the Spark tests first, because they take longest. Otherwise one of several processes might run them alone at the end."""
    items.sort(key=lambda item: item.get_closest_marker("spark") is None)
