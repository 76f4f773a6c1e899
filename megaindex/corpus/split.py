"""Cut a .bin/.idx pair into several, between documents, in memory independent of its size."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megaindex.corpus.cuts import Documents
from megaindex.corpus.inputs import check_documents
from megaindex.corpus.outcome import Outcome, checked_outcome
from megaindex.corpus.outputs import check_outputs
from megaindex.errors import InvalidArgument
from megaindex.format.append import append_documents
from megaindex.format.pair import MappedPair, map_pair
from megaindex.format.paths import pair_paths
from megaindex.format.sink import PairSink
from megaindex.io.copying import Progress
from megaindex.io.progress import Bar, silent


def split(
    source: str,
    outputs: Sequence[str],
    cut: Callable[[MappedPair], list[Documents]],
    *,
    dialect: str = "megatron",
    overwrite: bool = False,
    bar: Bar = silent,
) -> list[Outcome]:
    """Write parts of the pair `source` as pairs of their own; token type and modes are kept.

    The parts appear one after another, each whole; if one fails, those before it are removed
    again.

    Args:
        outputs: a prefix for each part, or a single one with {} for the number of the part.
        cut: the documents of each part, such as `lambda pair: cut_evenly(pair, 8, "tokens")`.
        dialect: whose dtype codes the files use.
        overwrite: replace existing pairs.

    Raises:
        InvalidArgument: the cuts do not fit the pair, or the outputs do not fit the cuts.
        FormatError: the pair is damaged.
        StorageError: an output exists, or a file cannot be read or written.
    """
    pair = map_pair(source, dialect, multimodal=False)
    tokens = check_documents(pair)
    parts = cut(pair)
    names = _names(outputs, len(parts))
    check_outputs(names, pair_paths(source), overwrite=overwrite)
    # ranges may overlap or leave documents out, so that the bar's end is an estimate for them
    progress = bar(tokens * pair.dtype.itemsize)
    # A pair whose few sequences happen to be none has no use for modes, and does not say.
    multimodal = pair.modes is not None and pair.header.num_sequences > 0
    sinks: list[PairSink] = []
    try:
        for name, documents in zip(names, parts, strict=True):
            paths = pair_paths(name)
            sinks.append(PairSink(*paths, pair.dtype, multimodal=multimodal, overwrite=overwrite))
            _write_part(pair, sinks[-1], documents, progress)
        return [checked_outcome(name, dialect) for name in names]
    except BaseException:
        for sink in sinks:
            sink.take_back()
        raise


def _names(outputs: Sequence[str], count: int) -> list[str]:
    if len(outputs) == 1 and "{}" in outputs[0]:
        width = len(str(count - 1))
        return [outputs[0].replace("{}", f"{number:0{width}}") for number in range(count)]
    if len(outputs) != count:
        raise InvalidArgument(
            f"outputs: {len(outputs)} given for {count} parts; give one for each, or a single one "
            f"with {{}} where the number of the part goes"
        )
    return list(outputs)


def _write_part(pair: MappedPair, sink: PairSink, documents: Documents, progress: Progress) -> None:
    try:
        sink.open()
        append_documents(pair, sink, *documents, progress)
        sink.publish(pair.header.dtype_code)
    finally:
        sink.discard()
