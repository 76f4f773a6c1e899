"""A directory's names, read at once."""

from __future__ import annotations

import gc
import os
import weakref
from pathlib import Path

from megaindex.cache.array_files import Listing
from megaindex.cache.array_group import uncollected


def test_names_and_links(tmp_path: Path) -> None:
    (tmp_path / "one").write_text("")
    os.link(tmp_path / "one", tmp_path / "two")
    (tmp_path / "other").write_text("")
    listing = Listing.of(str(tmp_path), at_most=3)
    assert listing is not None
    one, two, other, missing = (f"{tmp_path}/{name}" for name in ("one", "two", "other", "three"))
    assert one in listing
    assert missing not in listing
    assert listing.inode(one) == listing.inode(two) == os.stat(one).st_ino
    assert listing.inode(other) != listing.inode(one)
    assert listing.inode(missing) is None


def test_names_are_those_that_were_asked_for(tmp_path: Path) -> None:
    """A directory that was named with a slash at its end, as users do."""
    (tmp_path / "one").write_text("")
    listing = Listing.of(f"{tmp_path}/", at_most=3)
    assert listing is not None
    assert f"{tmp_path}//one" in listing


def test_too_many_names(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / str(number)).write_text("")
    assert Listing.of(str(tmp_path), at_most=2) is None


def test_no_directory(tmp_path: Path) -> None:
    empty = Listing.of(str(tmp_path / "none"), at_most=1)
    assert empty is not None
    assert f"{tmp_path}/none/one" not in empty
    (tmp_path / "file").write_text("")
    assert Listing.of(str(tmp_path / "file"), at_most=1) is None


class Node:
    """One end of a cycle."""

    def __init__(self) -> None:
        self.other = self


def test_what_was_made_without_collections_is_collected_later() -> None:
    with uncollected():
        assert not gc.isenabled()
        gone = weakref.ref(Node())
        assert gone() is not None
    assert gc.isenabled()
    gc.collect()
    assert gone() is None
