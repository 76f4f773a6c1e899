"""Write the order of a run as the index arrays that a framework's own reader takes.

The framework finds them under the names of its cache, and builds none: its runs serve this order,
without megaindex."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from megaindex.cache.array_files import EXPORT_FORMATS, ExportFormat, Identity, NamedDataset
from megaindex.cache.fingerprint import corpus_fingerprint, corpus_stamp
from megaindex.cache.npy import map_npy
from megaindex.cache.sidecar import read_sidecar
from megaindex.cli.options import Parser, add_flags, print_json, take_run
from megaindex.cli.plan import (
    add_run_arguments,
    check_lock_alone,
    recipe_of,
    skips_of_options,
)
from megaindex.errors import FormatError, InvalidArgument, visible
from megaindex.index.frameworks import SPLITS, Split
from megaindex.io.atomic import read_named
from megaindex.io.paths import check_local
from megaindex.settings.arguments import named_as_in_files, read_settings
from megaindex.settings.run_builder import resolve
from megaindex.settings.run_settings import RunSettings
from megaindex.validation import check_choice, count_of

if TYPE_CHECKING:
    from megaindex.cache.array_files import ArrayFiles, Arrays
    from megaindex.index.spans import Index
    from megaindex.lock.settings import LockedSettings
    from megaindex.run.run import Run


@dataclass(frozen=True, kw_only=True)
class ExportedSet:
    """The arrays of one subset, and the files in which the framework looks for them."""

    dataset: NamedDataset
    files: ArrayFiles
    text: str
    """Content of the marker."""
    arrays: Arrays
    stream: Run
    index: Index
    short: int
    """Samples that the reader completes with padding."""
    status: str = ""


def main(arguments: Sequence[str]) -> int:
    options = _parser().parse_args(arguments)
    take_run(options, "export")
    target = EXPORT_FORMATS[check_choice("--to", options.to, tuple(EXPORT_FORMATS))]
    _check_folder(options, target)
    with named_as_in_files(vars(options)):
        settings = _settings_of(options)
        sets = [_published(each, options) for each in _sets(settings, target, options)]
    if options.json:
        shared = {
            "to": options.to,
            "order": sets[0].stream.order,
            "data_path": sets[0].dataset.path,
        }
        print_json({**shared, "datasets": list(map(_facts, sets))})
    else:
        _print(sets, target, options)
    return int(options.check and any(each.status != "as exported" for each in sets))


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="megaindex export", description=__doc__, allow_abbrev=False)
    add_run_arguments(parser)
    group = parser.add_argument_group("export")
    add = group.add_argument
    add("--to", metavar="F", required=True, help=f"{', '.join(EXPORT_FORMATS)}")
    add("--lock", metavar="FILE", help="the run of a lock, in place of its settings")
    add("--subset", nargs="+", choices=SPLITS, help="default: all that the run reads")
    meaning = "Megatron-LM: a -description.txt that it wrote with the same tokenizer and split"
    add("--description", metavar="FILE", help=meaning)
    add("--check", action="store_true", help="compare the files that are there; write nothing")
    add_flags(group, "--cache-dir", help="folder in which the framework looks")
    add_flags(group, "--overwrite", help="replace arrays that were exported before")
    add_flags(group, "--json")
    return parser


def _check_folder(options: argparse.Namespace, target: ExportFormat) -> None:
    given = options.cache_dir is not None
    if given:
        check_local(options.cache_dir, "give a folder on a disk")
    if given and target.folder == "none":
        raise InvalidArgument(
            f"--cache-dir: the arrays of {options.to} lie beside its data; leave the flag out"
        )
    if not given and target.folder == "required":
        raise InvalidArgument(
            f"--cache-dir is missing: the folder in which {options.to} looks for index arrays, its "
            f"{target.setting}"
        )
    if (options.description is None) != (options.to != "megatron"):
        raise InvalidArgument(
            "--description is missing: Megatron-LM names its arrays by the tokenizer too; give a "
            "…-description.txt that it wrote beside the index arrays of a run with this tokenizer"
            if options.to == "megatron"
            else f"--description: {options.to} names its arrays without one; leave it out"
        )


def _settings_of(options: argparse.Namespace) -> LockedSettings:
    """Return the settings of the options; their order is ``epoch`` by default."""
    from megaindex.lock.settings import settings_of

    options.skip = skips_of_options(options)
    if options.lock:
        from megaindex.lock.lock_file import read_lock
        from megaindex.lock.settings import checked_settings

        check_lock_alone(options)
        return checked_settings(read_lock(options.lock))
    recipe = recipe_of(options, besides=("skip", "split"))
    if recipe is not None:
        return settings_of(recipe)
    options.order = options.order or "epoch"
    return settings_of(resolve(read_settings(vars(options))))


def _sets(
    settings: LockedSettings, target: ExportFormat, options: argparse.Namespace
) -> list[ExportedSet]:
    """Return the arrays of each subset that the framework builds."""
    _check_sources(settings, options)
    wanted = [each for each in target.subsets if each in (options.subset or SPLITS)]
    streams = settings.runs(evaluation=wanted != ["train"])
    if streams["train"].skips is not None:
        raise InvalidArgument(
            "skips are applied by megaindex, not by the arrays; leave them out, or use the "
            "framework's adapter"
        )
    theirs = settings.under_framework(target.order, streams["train"], options.split)
    requests = _requests(theirs, streams)
    found = [
        _set(streams[subset], requests[subset], target, options)
        for subset in wanted
        if subset in requests
    ]
    if not found:
        raise InvalidArgument(
            f"--subset {' '.join(options.subset)}: the run reads nothing of it, or {options.to} "
            f"builds its arrays itself; give one of {', '.join(target.subsets)}"
        )
    return found


def _check_sources(settings: LockedSettings, options: argparse.Namespace) -> None:
    sources, tail = settings.train_sources, settings.given.tail
    if len(sources) != 1:
        raise InvalidArgument(
            f"the run has {len(sources)} sources, and the arrays are those of one corpus; merge "
            "the sources with megaindex merge, or use the framework's adapter"
        )
    if tail != "drop":
        raise InvalidArgument(
            f"--tail {tail}: the framework drops the samples that fill no batch; give drop"
        )
    if sources[0].tokens is not None:
        raise InvalidArgument(
            "an order is exported of documents; give --data-path or a recipe's path"
        )
    if options.to != "megatron":
        check_local(sources[0].path, f"{options.to} reads files on a disk")
    if any(getattr(sources[0], name, "") for name in ("labels", "loss_mask")):
        raise InvalidArgument("labels are read with other arrays; export the text alone")


def _requests(theirs: RunSettings, streams: Mapping[Split, Run]) -> dict[Split, NamedDataset]:
    """Return the values by which the framework names the arrays of each subset."""
    from megaindex.run.parts import parts_of
    from megaindex.run.sizing import own_sources, sizing_of
    from megaindex.run.target import evaluation_of, resolve_target

    stream = streams["train"]
    parts = parts_of(theirs)
    sizing = sizing_of(theirs, parts["train"], "train", None)
    resolved = resolve_target(theirs, sizing)
    if resolved.samples_consumed != stream.num_samples:
        raise InvalidArgument(
            f"the run serves {stream.num_samples} samples in {stream.num_steps} steps, and the "
            f"framework {resolved.samples_consumed}; give the batch sizes of its run"
        )
    if parts["train"][0].sequences != stream.sources[0].sequence_lengths.size:
        raise InvalidArgument(
            f"--split {theirs.data.split}: a recipe trains on all documents of its source; give "
            "1,0,0"
        )
    asked: dict[Split, int] = {"train": resolved.samples_requested}
    evaluation = evaluation_of(theirs, resolved.train_iters, parts)
    if evaluation is not None:
        asked |= {"valid": evaluation.valid_samples, "test": evaluation.test_samples}
    found: dict[Split, NamedDataset] = {}
    for subset, samples in asked.items():
        if subset not in streams or samples == 0:
            continue
        part = parts[subset][0]
        own = sizing_of(theirs, [part], subset, None, parts["train"])
        requested = own.requested(samples)
        found[subset] = NamedDataset(
            path=part.source.path,
            subset=subset,
            num_samples=None if requested is None else requested[0],
            sequence_length=theirs.sequence_length,
            seed=theirs.seed,
            split=theirs.data.split,
            apart=own_sources(theirs),
            tokens=part.tokens,
        )
    return found


def _set(
    stream: Run, dataset: NamedDataset, target: ExportFormat, options: argparse.Namespace
) -> ExportedSet:
    """Return the arrays of a subset and their names."""
    from megaindex.index.array_index import arrays_of
    from megaindex.index.spans import datasets_of

    (corpus,) = datasets_of(stream.index)
    if target.one_document_each and corpus.document_indices.size - 1 != len(corpus):
        raise InvalidArgument(
            f"{dataset.path}: {options.to} counts documents, and the pair has "
            f"{corpus.document_indices.size - 1} of {len(corpus)} sequences; write each document "
            "as one sequence"
        )
    if options.description is not None:
        dataset = replace(
            dataset, template=_read(options.description), template_path=options.description
        )
    files, text = target.files(dataset, options.cache_dir)
    index = _whole_epochs(stream.index)
    wide = target.rules.width_rule == "int64"
    found = arrays_of(index, corpus.sequence_lengths, wide=wide)
    if found.short_samples and not target.pads:
        raise InvalidArgument(
            f"{found.short_samples} of {index.num_samples} samples have fewer than "
            f"{dataset.sequence_length} tokens and a label, and {options.to} trains on the padding "
            "or fails at it; use order epoch, or the frameworks megatron and maxtext"
        )
    return ExportedSet(
        dataset=dataset,
        files=files,
        text=text,
        arrays=_for_reader(found, index.num_samples, target),
        stream=stream,
        index=index,
        short=found.short_samples,
    )


def _read(path: str) -> str:
    try:
        return read_named(path, longest=1 << 20).decode()
    except UnicodeDecodeError as error:
        raise FormatError(f"{path}: not a text file: {error}; give a description") from None


def _whole_epochs(index: Index) -> Index:
    """Return the source of a recipe whose samples it reads from the first on, else the index.

    Its whole epochs are iterated in the order in which they are cut, so samples share rows.
    """
    from megaindex.index.staged_index import StagedIndex

    if not isinstance(index, StagedIndex):
        return index
    begins = np.cumsum([0, *(stage.num_samples for stage in index.stages)])
    if all(stage.begins == (begin,) for stage, begin in zip(index.stages, begins, strict=False)):
        return index.sources[0]
    return index


def _for_reader(found: Any, num_samples: int, target: ExportFormat) -> Arrays:
    """Return the arrays with as many entries as the framework's reader expects.

    Where the length of a dataset is that of sample_index, rows between samples count too: entries
    beyond the last sample begin anew.
    """
    rows, shuffle = found.sample_index, found.shuffle_index
    if target.length == "rows":
        fewest = num_samples + target.rules.uncounted_samples
        missing = max(0, fewest - (len(rows) - 1))
        rows = np.concatenate((rows, np.repeat(rows[-1:], missing, axis=0)))
        shuffle = np.resize(shuffle, len(rows) - 1)
    return {"document_index": found.document_index, "sample_index": rows, "shuffle_index": shuffle}


def _published(one: ExportedSet, options: argparse.Namespace) -> ExportedSet:
    """Write the arrays, unless they are there; with ``--check`` compare them alone.

    Raises:
        FormatError: there are files with other content.
    """
    from megaindex.cache.array_group import ArrayWriter
    from megaindex.cache.claim import build_once

    def find() -> str | None:
        state, path = _state(one)
        if state == "different":
            _check_replaceable(one, path, options.overwrite)
        return "already there" if state == "as exported" else None

    def build() -> str:
        with ArrayWriter(one.files) as writer:
            writer.copy(one.arrays)
            writer.publish(_identity(one), one.text, "exported")
        return "written"

    if options.check:
        return replace(one, status=_state(one)[0])
    folder, _, name = str(one.files).rpartition("/")
    return replace(one, status=build_once(folder or ".", name, find, build))


def _state(one: ExportedSet) -> tuple[str, str]:
    """Return "as exported", "missing" if a file is, or "different" and the path of such a file."""
    present = [path for path in one.files.paths if os.path.lexists(path)]
    for name, path in one.files.arrays.items():
        # a framework lists documents behind the last sample too, which nobody reads
        begins = name == "document_index"
        if path in present and not _holds(path, one.arrays[name], begins=begins):
            return "different", path
    marker = one.files.marker
    if marker in present and _read(str(marker)) != one.text:
        return "different", str(marker)
    return ("as exported" if len(present) == len(one.files.paths) else "missing"), ""


def _holds(path: str, ours: Any, *, begins: bool) -> bool:
    """Return whether a file holds this array, or begins with it."""
    try:
        array, _ = map_npy(path)
    except FormatError:
        return False
    found = array[: len(ours)] if begins and array.ndim else array
    return array.dtype == ours.dtype and np.array_equal(found, ours)


def _check_replaceable(one: ExportedSet, path: str, overwrite: bool) -> None:
    """Raise FormatError unless the files may be replaced, which `megaindex export` wrote."""
    record = read_sidecar(one.files)
    ours = record is not None and record.origin == "exported"
    if ours and overwrite:
        return
    raise FormatError(
        f"{path}: has other content than order {one.stream.order} of this run; "
        + (
            "give --overwrite, or another --cache-dir"
            if ours
            else "remove the files of that name, which megaindex export did not write"
        )
    )


def _identity(one: ExportedSet) -> Identity:
    from megaindex.index.description import describe_index
    from megaindex.index.spans import datasets_of

    (corpus,) = datasets_of(one.index)
    described = describe_index(one.index)
    return Identity(
        settings=lambda: {
            **described,
            "order": one.stream.order,
            "requested": one.dataset.num_samples,
        },
        corpus=lambda: corpus_fingerprint(corpus),
        stamp=corpus_stamp(one.dataset.path),
        facts=lambda: {
            "sequences": len(corpus),
            "num_epochs": one.index.num_epochs,
            "tokens_per_epoch": one.index.tokens_per_epoch,
        },
    )


def _facts(one: ExportedSet) -> dict[str, Any]:
    return {
        "subset": one.dataset.subset,
        "num_samples": one.index.num_samples,
        "num_epochs": one.index.num_epochs,
        "samples_requested": one.dataset.num_samples,
        "samples_served": one.stream.num_samples,
        "padded_samples": one.short,
        "files": [*one.files.arrays.values(), *([one.files.marker] if one.files.marker else [])],
        "status": one.status,
    }


def _print(sets: Sequence[ExportedSet], target: ExportFormat, options: argparse.Namespace) -> None:
    first = sets[0]
    print(f"order {first.stream.order} of {visible(first.dataset.path)} for {options.to}")
    for one in sets:
        epochs = count_of(one.index.num_epochs, "epoch")
        print(
            f"  {one.dataset.subset:<5}  {one.index.num_samples:,} samples, {epochs}, "
            f"the run reads {one.stream.num_samples:,}: {one.status}\n"
            f"         {visible(str(one.files))}*"
        )
    if any(one.short for one in sets):
        print(
            "  Labels behind the end of a document carry loss, unless documents end in the eod "
            "token\n  and eod_mask_loss is set."
        )
    if not options.check:
        print(f'  A run that does not find them logs "{target.missed}".')
