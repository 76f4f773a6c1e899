"""What trials in this process put in the place of background work is taken back after each test."""

from __future__ import annotations

import pytest

from megaindex.cache import array_group as group
from megaindex.cache import entry


@pytest.fixture(autouse=True)
def background_work_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in ((entry, "make_durable_later"), (group, "make_sets_durable_later")):
        monkeypatch.setattr(module, name, getattr(module, name))
