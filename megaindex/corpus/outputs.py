"""Refuse outputs that must not be written, before any work is done."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

from megaindex.errors import InvalidArgument
from megaindex.format.paths import check_not_a_half, pair_paths
from megaindex.io.atomic import AtomicFiles
from megaindex.io.locations import refuse_zero_byte


def check_outputs(outputs: Sequence[str], inputs: Iterable[str], *, overwrite: bool) -> None:
    """Check that no output is an input, given twice, or there already.

    Args:
        outputs: prefixes of pairs.
        inputs: paths of the files that are read.

    Raises:
        InvalidArgument: an output is an input or another output, or names half a pair; or a path
            holds a zero byte.
        StorageError: an output exists and may not be replaced.
    """
    inputs = tuple(inputs)
    for path in (*inputs, *outputs):
        refuse_zero_byte(path)
    taken = {os.path.realpath(path) for path in inputs}
    for prefix in outputs:
        check_not_a_half(prefix)
        for path in pair_paths(prefix):
            real = os.path.realpath(path)
            if real in taken:
                raise InvalidArgument(
                    f"{path}: is an input, or another output, of the same call; choose another "
                    f"prefix"
                )
            taken.add(real)
        AtomicFiles(pair_paths(prefix), overwrite=overwrite)  # looks for existing files
