"""GPT-NeoX's GPT2Dataset over megaindex's indices and batched reading.

The functions here stand for their methods. A dataset keeps GPT-NeoX's attributes, the three arrays
among them; batches are read at once through ``__getitems__``. A dataset over anything else than
GPT-NeoX's own files is left to GPT-NeoX's code, and so is every PairwiseDataset.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from megaindex._types import I64
from megaindex.adapters.neox.arrays import fetch_in_group
from megaindex.adapters.neox.framework import framework, mapped, read_as_neox
from megaindex.adapters.neox.samples import NeoxSamples
from megaindex.adapters.reports import NEOX, ServedDataset
from megaindex.errors import InvalidArgument, MissingFile, OutOfRange
from megaindex.index.frameworks import as_range
from megaindex.loader.neox_dataset import Rows, TextRows

logger = logging.getLogger("megaindex")


def init_gpt2(
    self: Any,
    name: str,
    data_prefix: str,
    documents: Any,
    indexed_dataset: Any,
    num_samples: int | None,
    num_epochs: int | None,
    seq_length: int,
    seed: int,
    pack_impl: Any = "packed",
    allow_chopped: bool = True,
    build_index_mappings: bool = True,
    use_shared_fs: bool = True,
    label_dataset: Any = None,
    reward_dataset: Any = None,
    ref_dataset: Any = None,
) -> None:
    """``GPT2Dataset.__init__``."""
    given = dict(locals())
    companions = {"label": label_dataset, "reward": reward_dataset, "ref": ref_dataset}
    check_exists(data_prefix, indexed_dataset)
    if _is_left(given, [indexed_dataset, *companions.values()]):
        return
    kept = ("name", "pack_impl", "allow_chopped", "indexed_dataset", "label_dataset",
            "reward_dataset", "ref_dataset", "seq_length")  # fmt: skip
    vars(self).update({attribute: given[attribute] for attribute in kept})
    if reward_dataset is not None and pack_impl != "unpacked":
        raise InvalidArgument(
            f"{name}: rewards need pack_impl unpacked, got {pack_impl}; leave one of them out"
        )
    self.megaindex = NeoxSamples(
        name=name,
        data_prefix=data_prefix,
        seq_length=seq_length,
        seed=seed,
        pack_impl=pack_impl,
        allow_chopped=allow_chopped,
        exact=framework().exact,
        requested=num_samples,
        num_epochs=num_epochs or None,
        documents=as_range(np.asarray(documents)),
        text=mapped(indexed_dataset),  # type: ignore[arg-type]  # not left
        companions={what: mapped(dataset) for what, dataset in companions.items()},
        policy=framework().policy,
        reshuffles=framework().exact and bool(num_epochs) and name.startswith("train"),
    )
    if build_index_mappings:  # its array attributes are set on first access
        _incomplete.add(self)
        fetch_in_group(self, _report)


def init_pairwise(self: Any, name: str, pos_data_prefix: str, *given: Any, **named: Any) -> None:
    """``PairwiseDataset.__init__``: GPT-NeoX's own, which also reads the samples.

    Raises:
        InvalidArgument: `install` has another final epoch than GPT-NeoX.
    """
    reason = "megaindex has no arrays of pairs of texts"
    NEOX.leave("PairwiseDataset", f"{name} of {pos_data_prefix}", reason)
    _check_final_epoch(name)
    self.megaindex = None
    own_init = framework().original("pairwise_dataset", "PairwiseDataset", "__init__")
    own_init(self, name, pos_data_prefix, *given, **named)
    for dataset in [each for each in vars(self).values() if mapped(each) is not None]:
        read_as_neox(dataset)


def _is_left(given: dict[str, Any], corpora: Sequence[Any]) -> bool:
    """Return True after GPT-NeoX's own constructor made a dataset over a corpus of another class.

    ``given`` are the arguments of the constructor, in order.

    Raises:
        InvalidArgument: `install` has another final epoch than GPT-NeoX.
    """
    left = next((each for each in corpora if each is not None and mapped(each) is None), None)
    if left is None:
        return False
    name = given["name"]
    is_own = framework().is_own(left)
    other = "is not one of GPT-NeoX's indexed datasets"
    reason = "has reading methods of its own" if is_own else other
    origin = f"{name} of {given['data_prefix']}"
    NEOX.leave("GPT2Dataset", origin, f"{type(left).__name__} {reason}")
    _check_final_epoch(name)
    given["self"].megaindex = None
    framework().original("gpt2_dataset", "GPT2Dataset", "__init__")(*given.values())
    return True


def _check_final_epoch(name: str) -> None:
    """Raise InvalidArgument if `install` has a final epoch that GPT-NeoX's code does not have."""
    policy = framework().policy
    if policy.final_epoch:
        raise InvalidArgument(
            f"{name}: GPT-NeoX's own code builds its arrays, which has no separate_final_epoch "
            f"{policy.row.separate_final_epoch}; leave that setting out of install()"
        )


def _report(made: Sequence[Any], seconds: float) -> None:
    """Record datasets, and print GPT-NeoX's own lines about them."""
    lines, rows = [], []
    for dataset in made:
        samples: NeoxSamples = dataset.megaindex
        fetched, num_samples = samples.fetch(), samples.num_samples
        num_epochs = fetched.sidecar.facts["num_epochs"]
        if fetched.was_built:
            lines.append(" > could not find index map files, building the indices ...")
        lines.append(f"    total number of samples: {num_samples + 1}")
        lines.append(f"    total number of epochs: {samples.epochs_as_neox_counts(num_epochs)}")
        rows.append(
            ServedDataset(
                framework=NEOX.framework,
                kind=type(dataset).__name__,
                name=f"{samples.name} of {samples.data_prefix}",
                served_by="megaindex",
                how="built" if fetched.was_built else "opened",
                samples=num_samples,
                epochs=num_epochs,
                seconds=seconds,
                cache=str(samples.request().files),
            )
        )
    framework().print_line("\n".join(lines))
    NEOX.serve_each(rows)
    for kind in {type(dataset): None for dataset in made}:
        if kind.__getitem__ is not read_sample:
            reason = f"{kind.__name__} has a __getitem__ of its own"
            NEOX.leave("reading", kind.__name__, reason)


ARRAYS = {
    "doc_idx": "document_index",
    "sample_idx": "sample_index",
    "shuffle_idx": "shuffle_index",
}
LENGTHS = {"shuffle_idx_len": -1, "sample_idx_len": 0}
"""Lengths minus the number of samples."""
_incomplete: weakref.WeakSet[Any] = weakref.WeakSet()


def get_deferred(self: Any, name: str) -> Any:
    """``__getattr__``: sets arrays and lengths on first access."""
    if self in _incomplete:
        samples: NeoxSamples = self.megaindex
        if name in LENGTHS:
            size = samples.num_samples
            vars(self).update({which: size + more for which, more in LENGTHS.items()})
            return vars(self)[name]
        if name in ARRAYS:
            index = samples.epoch(0).index
            vars(self).update({ours: getattr(index, array) for ours, array in ARRAYS.items()})
            return vars(self)[name]
    raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


def get_complete_state(self: Any) -> dict[str, Any]:
    """``__getstate__``: the complete state, for processes without megaindex."""
    if self in _incomplete:
        for name in (*ARRAYS, *LENGTHS):
            getattr(self, name)
    return {name: value for name, value in vars(self).items() if name != TEXT_ROWS}


def complete_all() -> None:
    """Complete every dataset, before the methods that do it are removed."""
    for dataset in list(_incomplete):
        try:
            get_complete_state(dataset)
        except Exception:  # noqa: PERF203 the others have to be completed all the same
            logger.warning("%s: left incomplete", dataset.name, exc_info=True)
    _incomplete.clear()


def check_exists(prefix: str, dataset: Any) -> None:
    """Check that GPT-NeoX found the pair, for which it would return None.

    Raises:
        MissingFile: the dataset is None.
    """
    if dataset is not None:
        return
    missing = [f"{prefix}{end}" for end in (".idx", ".bin") if not os.path.isfile(prefix + end)]
    if len(missing) == 1:
        raise MissingFile(f"{missing[0]}: missing, although the other file of the pair exists")
    raise MissingFile(
        f"{prefix}.idx and {prefix}.bin: at least one is missing, or its format is not that of "
        "data_impl; check the path in the configuration"
    )


def count_samples(self: Any) -> int:
    """``__len__``: without the last sample, as in GPT-NeoX, unless ``exact``."""
    samples: NeoxSamples | None = getattr(self, "megaindex", None)
    if samples is None:
        return max(0, int(min(self.shuffle_idx_len, self.sample_idx_len)))
    return samples.num_samples if samples.exact else max(0, samples.num_samples - 1)


def is_left(self: Any) -> bool:
    """Return True if GPT-NeoX's own code reads a dataset: it was left to it, or is older than
    `install`.

    Raises:
        InvalidArgument: `install` has settings that came too late for it.
    """
    if "megaindex" not in vars(self):
        framework().check_late(f"{type(self).__name__} {getattr(self, 'name', '')}")
    return getattr(self, "megaindex", None) is None


def read_sample(self: Any, idx: int) -> Any:
    """``__getitem__``."""
    rows = read_texts(self, [idx], _make_text_rows)
    if rows is not None:
        return {"text": rows[0]}
    if is_left(self):
        return framework().original("gpt2_dataset", "GPT2Dataset", "__getitem__")(self, idx)
    return _read(self, [idx])[0]


def read_samples(self: Any, ids: Sequence[int]) -> list[Any]:
    """``__getitems__``: the samples of a batch, read together, or one by one if GPT-NeoX's code
    serves the dataset or a subclass overrides ``__getitem__``."""
    if is_left(self) or type(self).__getitem__ is not read_sample:
        return [self[idx] for idx in ids]
    rows = read_texts(self, list(ids), _make_text_rows)
    if rows is not None:
        return BatchRows({"text": rows})
    return _read(self, ids)


TEXT_ROWS = "_megaindex_text_rows"
"""Attribute of the `TextRows` of a dataset or a blend, which are not pickled."""


def read_texts(self: Any, ids: list[Any], make: Callable[[Any], TextRows | None]) -> I64 | None:
    """Return samples of a dataset or a blend of plain text, read in one call, int64[n, S + 1].

    None if it is anything else, or if it or a source lacks one of them. ``make`` makes the reader.
    """
    known = self.__dict__
    if TEXT_ROWS not in known:
        known[TEXT_ROWS] = make(self)
    texts: TextRows | None = known[TEXT_ROWS]
    try:
        return None if texts is None else texts.read(ids)
    except OutOfRange:
        return None


def _make_text_rows(self: Any) -> TextRows | None:
    if not is_plain_text(self):
        return None
    samples: NeoxSamples = self.megaindex
    return TextRows(samples.epoch(0).index, [samples.text])


class BatchRows(list[Rows]):
    """The samples of a batch as rows of ``whole``, arrays [n, S + 1] by name.

    PyTorch's DataLoader takes a list of samples and stacks them; ``collate`` uses ``whole``.
    """

    def __init__(self, whole: Rows) -> None:
        if len(whole) == 1:  # the most frequent case
            [(name, values)] = whole.items()
            super().__init__([{name: row} for row in values])
        else:
            rows = zip(*whole.values(), strict=True)
            super().__init__([dict(zip(whole, row, strict=True)) for row in rows])
        self.whole = whole


def join_batches(parts: Sequence[tuple[I64, Sequence[Any]]], count: int) -> list[Any]:
    """Return the samples of a batch, joined from parts of (positions, samples)."""
    if len(parts) == 1:
        only = parts[0][1]
        return only if isinstance(only, BatchRows) else list(only)
    wholes = [(at, part.whole) for at, part in parts if isinstance(part, BatchRows)]
    shapes = {
        tuple((name, values.shape[1]) for name, values in whole.items()) for _, whole in wholes
    }
    if len(wholes) == len(parts) and len(shapes) == 1:
        together = {
            name: np.empty((count, values.shape[1]), values.dtype)
            for name, values in wholes[0][1].items()
        }
        for at, whole in wholes:
            for name, values in whole.items():
                together[name][at] = values
        return BatchRows(together)
    rows: list[Any] = [None] * count
    for at, part in parts:
        for position, row in zip(at.tolist(), part, strict=True):
            rows[position] = row
    return rows


def is_plain_text(dataset: Any) -> bool:
    """Return True if samples are tokens of cut documents alone, read by `read_samples`."""
    samples = getattr(dataset, "megaindex", None)
    return (
        isinstance(samples, NeoxSamples)
        and type(dataset).__getitem__ is read_sample
        and getattr(type(dataset), "__getitems__", None) is read_samples
        and samples.pack_impl == "packed"
        and all(companion is None for companion in samples.companions.values())
    )


def _read(self: Any, ids: Sequence[int]) -> list[Any]:
    samples: NeoxSamples = self.megaindex
    wanted: I64 = np.asarray(ids, np.int64)
    if not samples.exact:
        wanted = _substitute(self, wanted)
    if not samples.reshuffles:
        return BatchRows(samples.epoch(0).read(wanted))
    epochs, within = np.divmod(wanted, samples.num_samples)
    parts = []
    for epoch in np.unique(epochs).tolist():
        at = np.flatnonzero(epochs == epoch)
        parts.append((at, BatchRows(samples.epoch(epoch).read(within[at]))))
    return join_batches(parts, wanted.size)


def _substitute(self: Any, ids: I64) -> I64:
    """Return the ids of the samples that GPT-NeoX serves for ``ids``.

    An id beyond the samples is taken modulo the length, which of a single sample is 0, and NumPy's
    remainder by 0 is 0; and the first sample replaces the last one of pack_until_overflow, which no
    document follows.
    """
    samples, size = self.megaindex.num_samples, count_samples(self)
    if samples < 1:
        return ids
    served = np.where((ids >= 0) & (ids >= samples), ids % max(1, size), ids)
    if self.pack_impl == "pack_until_overflow" and self.shuffle_idx[0] != samples - 1:
        rows = self.shuffle_idx[np.clip(served, 0, samples - 1)]
        served = np.where((rows == samples - 1) & (served >= 0), 0, served)
    if (served != ids).any() and not getattr(self, "_has_warned", False):
        self._has_warned = True
        first = int((served != ids).argmax())
        logger.warning(
            "%s: sample %d does not exist, and as in GPT-NeoX sample %d is served in its place; "
            "install(exact=True) raises OutOfRange",
            self.name,
            int(ids[first]),
            int(served[first]),
        )
    return served
