"""Put .bin/.idx pairs one behind the other, in memory that does not depend on their size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megaindex.corpus.inputs import check_inputs
from megaindex.corpus.outcome import Outcome, checked_outcome
from megaindex.corpus.outputs import check_outputs
from megaindex.format.append import append_pair
from megaindex.format.dtypes import code_of_dtype, get_dialect
from megaindex.format.pair import map_pair
from megaindex.format.paths import pair_paths
from megaindex.format.sink import PairSink
from megaindex.io.progress import Bar, silent


def merge(
    output: str,
    inputs: Sequence[str],
    *,
    dtype: Any | None = None,
    dialect: str = "megatron",
    overwrite: bool = False,
    bar: Bar = silent,
) -> Outcome:
    """Write the documents of `inputs`, in their order, as the pair `output`.

    The bytes are those of Megatron's merge_datasets.py, except that bytes of a .bin which belong
    to no sequence are left behind (there they shift every later document). All inputs are checked
    first; the output appears whole or not at all. One input at a time is open.

    Args:
        dtype: widen all tokens to this type; None demands that the inputs have the same type.
        dialect: whose dtype codes are read and written.
        overwrite: replace an existing pair.

    Raises:
        InvalidArgument: inputs do not go together, or the output is one of them.
        FormatError: an input is damaged.
        StorageError: the output exists, or a file cannot be read or written.
    """
    files = (path for prefix in inputs for path in pair_paths(prefix))
    check_outputs([output], files, overwrite=overwrite)
    table = get_dialect(dialect)
    common = check_inputs(inputs, table, dtype)
    sink = PairSink(
        *pair_paths(output), common.dtype, multimodal=common.multimodal, overwrite=overwrite
    )
    try:
        sink.open()
        progress = bar(common.nbytes)
        for prefix in inputs:
            source = map_pair(prefix, dialect, multimodal=False)
            source.check_everything()  # again: it may have changed since
            append_pair(source, sink, progress)
        sink.publish(code_of_dtype(common.dtype, table))
        return checked_outcome(output, dialect)
    except BaseException:
        sink.take_back()
        raise
    finally:
        sink.discard()
