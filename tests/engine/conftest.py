"""Every engine is held to the same promises: two workers of this machine, and two of Ray."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from ray_clusters import quiet

from megaindex.engine import Engine, open_engine


@pytest.fixture(params=["local", "ray"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    if request.param == "local":
        with open_engine(workers=2) as here:
            yield here
        return
    with quiet(), open_engine("ray", address=request.getfixturevalue("ray_address")) as cluster:
        yield cluster
