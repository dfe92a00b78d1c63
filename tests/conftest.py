"""Settings for all tests. The shared servers and the shared Spark session are in support/fixtures.py."""

import os

import pytest
from hypothesis import HealthCheck, settings

# A failed assertion in support/ then shows the compared values, as in a test.
pytest.register_assert_rewrite("support")
pytest_plugins = ["support.fixtures", "support.scheduling"]

# The servers of the tests are on this machine, where the proxy of a network does not reach them.
_direct = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
if _direct != "*":
    os.environ["no_proxy"] = os.environ["NO_PROXY"] = f"{_direct},127.0.0.1,localhost".lstrip(",")

# The load of the machine varies, so the duration of an example means nothing.
settings.register_profile("cdcpipe", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("cdcpipe")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the Spark tests first, because they take longest. Otherwise one of several processes might run them alone at the end."""
    items.sort(key=lambda item: item.get_closest_marker("spark") is None)
