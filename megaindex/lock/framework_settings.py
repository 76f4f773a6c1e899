"""Settings of a framework's run in a lock, and its runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any, ClassVar

from megaindex._types import I64
from megaindex.errors import InvalidArgument
from megaindex.format import IndexedDataset
from megaindex.index.frameworks import SPLITS, Split
from megaindex.index.order_settings import make_order, order_of
from megaindex.index.skips import read_skips, source_number
from megaindex.lock.lock_file import Lock
from megaindex.lock.pinned_files import Folder
from megaindex.lock.setting_values import (
    changed_fields,
    every_field,
    number,
    numbers,
    placed,
    tuples,
    with_paths,
    with_rows,
)
from megaindex.lock.shape import PATHS
from megaindex.run.from_settings import run_of_settings
from megaindex.run.parts import SplitPart, parts_of
from megaindex.run.run import Run
from megaindex.run.subset import skip_settings, with_files
from megaindex.run.target import evaluation_of
from megaindex.settings.amended import AmendedBlend
from megaindex.settings.batch_schedule import BatchSchedule, steps_of
from megaindex.settings.megatron_versions import find_version
from megaindex.settings.run_settings import Data, Evaluation, RunSettings, Target
from megaindex.settings.sources import Source

_WITHOUT = ("order", "data", "batch", "target", "evaluation", "version", "exact", "notes",
            "ignored", "coverage", "blend_counts", "skip")  # fmt: skip


class FrameworkSettings:
    """Settings of a framework whose run is locked.

    Args:
        settings: the settings; relative paths are those of the current directory.
        cache_dir: cache of built indices.
        amend: how the run began, and the changes of its blend since.
    """

    kind: ClassVar[str] = "run"

    def __init__(
        self,
        settings: RunSettings,
        cache_dir: Folder | None = None,
        amend: AmendedBlend | None = None,
    ) -> None:
        self.given, self.settings = settings, _with_absolute_paths(settings)
        self._cache_dir = cache_dir
        self.amend = None if amend is None else amend.placed()

    @classmethod
    def read(
        cls,
        values: Mapping[str, Any],
        _lock: Lock,
        paths: Sequence[str],
        files: Sequence[str],
        cache_dir: Folder | None = None,
    ) -> FrameworkSettings:
        """Return what `to_json` wrote; ``paths`` and ``files`` are those of the lock's rows."""
        values = dict(with_paths(values, paths))
        amend = AmendedBlend.from_json(values.pop("amend")) if "amend" in values else None
        return cls(_settings_of(values, files), cache_dir, amend)

    @property
    def dialect(self) -> str:
        """Meaning of the token types of the pairs."""
        return self.settings.row.file_dialect

    @property
    def paths(self) -> list[str]:
        """Prefixes of the pairs, each once."""
        sources = self.settings.all_sources
        named = [getattr(source, name, "") for name in PATHS for source in sources]
        named += [] if self.amend is None else self.amend.paths
        return list(dict.fromkeys(path for path in named if path))

    @property
    def pairs(self) -> dict[str, IndexedDataset]:
        """Pairs that are open, by their paths."""
        return {}

    @property
    def files(self) -> list[str]:
        """Paths of the files of documents, each once."""
        named = [s.documents for s in self.settings.skip if isinstance(s.documents, str)]
        return list(dict.fromkeys(named))

    def runs(
        self,
        most: Mapping[str, int] | None = None,
        *,
        evaluation: bool = True,
        train: Run | None = None,
    ) -> dict[Split, Run]:
        """Return the run of training, and those of the evaluation that the settings give.

        ``train`` is that of training, if it is there. Of ``--full-validation`` ranks decide the
        samples, so that it has none.

        Raises:
            InvalidArgument: the run cannot be built, or has more than ``most`` samples.
            FormatError, StorageError: a source cannot be read.
        """
        settings = self.settings
        train = self._run("train", most) if train is None else train
        runs: dict[Split, Run] = {"train": train}
        if not evaluation or settings.evaluation.full:
            return runs
        parts = parts_of(settings)
        # moved samples make steps behind the others
        steps = train.num_steps if train.skips is None else train.skips.num_steps
        rounds = evaluation_of(settings, steps, parts)
        if rounds is not None:
            counts = (rounds.valid_samples, rounds.test_samples)
            for name, samples in zip(SPLITS[1:], counts, strict=True):
                if samples and _has_samples(settings, parts[name]):
                    runs[name] = self._run(name, most)
        return runs

    def _run(self, name: Split, most: Mapping[str, int] | None) -> Run:
        return run_of_settings(
            self.settings,
            subset=name,
            cache_dir=self._cache_dir,
            most_samples=None if most is None else most.get(name, 0),
            amend=self.amend,
        )

    @property
    def train_sources(self) -> Sequence[Source]:
        """The sources of training, those before a change too."""
        if self.amend is None:
            return self.given.data.train
        began = self.amend.sources
        known = {source.path for source in began}
        joined = [path for path in dict.fromkeys(self.amend.paths) if path not in known]
        return (*began, *(Source(path=path) for path in joined))

    def under_framework(self, order: str, train: Run, _split: str | None) -> RunSettings:
        """Return the settings of a run in a framework's ``order`` that takes the same steps.

        Raises:
            InvalidArgument: the arrays of one such run do not hold the samples of this one.
        """
        settings = self.given
        if settings.consumed_samples or settings.phases:
            raise InvalidArgument(
                "--consumed-samples and --phase-transition-iterations: the arrays are those of a "
                "whole run; leave them out"
            )
        if settings.target.kind == "loader_epochs":
            raise InvalidArgument(
                "train_epochs reads the arrays of one epoch again and again; give train_iters in "
                "its place, and --train-iters or --epochs here"
            )
        of_orders: dict[str, Any] = {"shuffle_name": "", "subset": None, "held_out": None}
        unnamed = tuple(replace(source, **of_orders) for source in settings.data.train)
        return replace(
            settings,
            order=order,
            data=replace(settings.data, train=unnamed),
            target=Target(kind="iterations", value=Fraction(train.num_steps)),
            variance_buffer=None,
            evaluation=Evaluation(iterations=0)
            if settings.evaluation.full
            else settings.evaluation,
        )

    def step_bounds(self, name: str, subset: Mapping[str, Any]) -> I64:
        """Return int64[steps + 1], the bounds of the steps of a subset; no index is built."""
        settings = self.settings
        if name != "train":
            size = settings.evaluation.batch_size or settings.nominal_batch
            return steps_of(BatchSchedule.constant(size), 0, subset["samples"])[0].bounds
        index = subset["index"]
        end = index["end"] if index["order"] == "skipped" else subset["samples"]
        found = settings.steps_with_skips(end, int(settings.tail == "pad"))
        if found is not None:
            return found.steps.bounds
        return steps_of(settings.batch, settings.consumed_samples, end)[0].bounds

    def to_json(self, rows: Mapping[str, int], files: Mapping[str, int]) -> dict[str, Any]:
        """Return the settings with the rows of pairs and of other files by their paths."""
        settings = self.settings
        order = order_of(settings.order)
        changed = order.changed_settings
        if not settings.depends_on_python and self.amend is None:
            changed.pop("python_sum", None)
        data = every_field(settings.data, SPLITS)
        for split in SPLITS:
            if sources := [changed_fields(each) for each in getattr(settings.data, split)]:
                data[split] = sources
        found = {
            "order": {"name": order.name, **changed},
            **every_field(settings, _WITHOUT),
            "data": data,
            "batch": every_field(settings.batch),
            "target": every_field(settings.target),
            "evaluation": every_field(settings.evaluation),
            "version": None if settings.version is None else settings.version.name,
        }
        if self.amend is not None:
            found["amend"] = self.amend.to_json()
        if settings.exact:
            found["exact"] = True
        skip = {"skip": skip_settings(settings.skip, files)} if settings.skip else {}
        return {**with_rows(found, rows), **skip}


def _with_absolute_paths(settings: RunSettings) -> RunSettings:
    """Return the settings with the absolute paths of their pairs and files; URLs stay."""
    each: dict[str, Any] = {
        name: tuple(map(placed, getattr(settings.data, name))) for name in SPLITS
    }
    names = [source.path for source in settings.data.train]
    skips = []
    for skip in settings.skip:
        row = None if skip.source is None else str(source_number(skip.source, names))
        skips.append(replace(placed(skip, ("documents",)), source=row))
    return replace(settings, data=replace(settings.data, **each), skip=tuple(skips))


def _has_samples(settings: RunSettings, parts: Sequence[SplitPart]) -> bool:
    """Return True if each source has a sample; a framework fails at one that has none."""
    short = settings.row.is_framework or settings.row.order == "packed"  # which has shorter samples
    least = 1 if short else settings.sequence_length + 1
    return bool(parts) and all(part.tokens >= least for part in parts)


def _settings_of(given: Mapping[str, Any], files: Sequence[str]) -> RunSettings:
    values = dict(given)
    skip = with_files(values.pop("skip", ()), files)
    order = {key: number(each) for key, each in values.pop("order").items()}
    name = order.pop("name")
    data, version = values.pop("data"), values.pop("version")
    sources: dict[str, Any] = {
        split: tuple(Source(**numbers(source, "weight")) for source in data.pop(split, ()))
        for split in SPLITS
    }
    target = values.pop("target")
    return RunSettings(
        order=make_order(name, order),
        data=Data(**sources, **numbers(data, "documents_alpha")),
        batch=BatchSchedule(**tuples(values.pop("batch"))),
        target=Target(
            kind=target["kind"],
            value=Fraction(target["value"]),
            per_source=tuple(map(Fraction, target.get("per_source", ()))),
        ),
        evaluation=Evaluation(**values.pop("evaluation")),
        version=None if version is None else find_version(version),
        skip=read_skips(skip, "skip", "/"),
        **tuples(numbers(values, "variance_buffer", "surplus")),
    )
