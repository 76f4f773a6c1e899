"""URLs of objects: s3://bucket/key, gs://bucket/key, az://container/key.

Keys are taken as they are written, without percent-encoding, as the stores' own tools take them.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from megaindex.errors import InvalidArgument

SCHEMES = ("s3", "gs", "az")
_OTHER_NAMES = {"s3a": "s3", "s3n": "s3", "gcs": "gs"} | dict.fromkeys(
    ("abfs", "abfss", "adl", "azure", "wasb", "wasbs"), "az"
)
# with one slash: what pathlib makes of a URL
_URL = re.compile(rf"(?!file:)(?:[a-z][a-z0-9+.-]+://|({'|'.join(SCHEMES)}):/)", re.IGNORECASE)

_NO_KEY = re.compile(r"(^|/)\.{0,2}(/|$)|[\x00-\x1f\x7f]")


class Place(NamedTuple):
    """Where an object is."""

    store: str
    """As ``s3://bucket``: what one client is made for."""
    key: str


def is_remote(path: str) -> bool:
    """Whether a path is a URL, so that an object store has what it names."""
    return ":" in path and _URL.match(path) is not None


def place_of(url: str) -> Place:
    """The parts of a URL.

    Raises:
        InvalidArgument: it is none of a known kind, or holds what might be a secret, which the
            message does not repeat.
    """
    scheme, separator, rest = url.partition("://")
    if not separator:
        raise InvalidArgument(
            f"{without_secrets(url)}: a URL has two slashes after its colon; pass it as a string, "
            "as pathlib drops one of them"
        )
    host, _, key = rest.partition("/")
    if any(sign in host for sign in "@:") or "?" in rest:
        what = "a query, as signed URLs do" if "?" in rest else "credentials or a port"
        raise InvalidArgument(
            f"{without_secrets(url)}: the URL holds {what}; leave that out: access comes from the "
            "environment, as docs/objects.md says"
        )
    if scheme.lower() not in SCHEMES:
        raise InvalidArgument(f"{url}: {_other_scheme(scheme.lower())}")
    if not key or not host:
        raise InvalidArgument(f"{url}: must name a bucket and a key in it, as s3://bucket/corpus")
    if _NO_KEY.search(key):
        raise InvalidArgument(
            f"{url!r}: a key with an empty part, '.', '..' or a control character cannot be asked "
            "for; copy the object to another key"
        )
    return Place(f"{scheme.lower()}://{host}", key)


def folder_of(url: str) -> Place:
    """The parts of a URL whose key begins those of others; the key is empty for a whole bucket.

    Raises:
        InvalidArgument: as `place_of`.
    """
    store, key = place_of(f"{url.removesuffix('/')}/any")
    return Place(store, key.removesuffix("any").removesuffix("/"))


def names_folder(url: str) -> bool:
    """Whether a URL ends in a slash, or names a bucket alone, so that it can be no object."""
    return url.endswith("/") or "/" not in url.partition("://")[2]


def _other_scheme(scheme: str) -> str:
    ours = _OTHER_NAMES.get(scheme)
    if ours is not None:
        example = "az://container/key" if ours == "az" else f"{ours}://bucket/key"
        return f"{scheme}:// is not a scheme here; write the same place as {example}"
    known = ", ".join(f"{each}://" for each in SCHEMES)
    return f"corpora are read from {known} and from files; copy it to one of them"


def without_secrets(url: str) -> str:
    """For messages: neither what is before an @ nor what is after a question mark. Secret keys may
    hold slashes, so that the host may seem to end before the @."""
    scheme, slashes, rest = re.split(r"(:/+)", url.partition("?")[0], maxsplit=1)
    if any(sign in rest.partition("/")[0] for sign in "@:"):
        rest = "…@" + rest.rpartition("@")[2] if "@" in rest else "…"
    return scheme + slashes + rest
