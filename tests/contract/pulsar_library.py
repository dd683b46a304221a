"""For test modules that import the client library: skipped without it on a laptop, failing where Pulsar is required."""

import os
from importlib.util import find_spec

import pytest

from tests.servers import NO_SERVER, PREFIX


def need_pulsar() -> None:
    """Called at the top of a module, before its imports of the library."""
    required = os.environ.get(PREFIX + "REQUIRE", "").replace(" ", "").split(",")
    if find_spec("pulsar") is None and not {"pulsar", "all"} & set(required):
        pytest.skip(f"{NO_SERVER}pulsar: install the extra `pulsar`", allow_module_level=True)
