"""Every engine is held to the same promises: two workers of this machine, and two of Ray."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from ray_clusters import quiet

from megaindex.engine import Engine, open_engine


@pytest.fixture(params=["local", "ray"], scope="module")
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """One for all tests of a module: what one of them breaks off must not disturb the next."""
    with ExitStack() as stack:
        if request.param == "local":
            yield stack.enter_context(open_engine(workers=2))
            return
        address = request.getfixturevalue("ray_address")
        with quiet():
            cluster = stack.enter_context(open_engine("ray", address=address))
        yield cluster
