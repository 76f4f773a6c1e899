"""Names of the two files of a pair."""

from __future__ import annotations

from megaindex.errors import InvalidArgument


def pair_paths(path_prefix: str) -> tuple[str, str]:
    """`(<prefix>.bin, <prefix>.idx)`."""
    return path_prefix + ".bin", path_prefix + ".idx"


def check_not_a_half(path_prefix: str) -> None:
    """InvalidArgument if the prefix is the full name of one of the files, a common slip."""
    for suffix in (".bin", ".idx"):
        if path_prefix.endswith(suffix):
            raise InvalidArgument(
                f"path_prefix={path_prefix!r}: names one file of the pair, and both are meant; "
                f"pass the prefix {path_prefix[: -len(suffix)]!r}"
            )
