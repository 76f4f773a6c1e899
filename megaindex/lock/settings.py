"""The settings of a run in a lock, from which it is opened again.

Fields: ``kind``, "recipe" or "run"; ``recipe``, the recipe file's mapping; ``run``, fields of
`RunSettings`. Paths of pairs are replaced by their rows in the lock's ``sources``, those of other
files by their rows in ``files``. Floats and fractions are text: "0.3" and "1/3".
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from megaindex._types import I64
from megaindex.builders.recipe import OpenRecipe, open_recipe
from megaindex.configs.batch_schedule import BatchSchedule, skip_steps, step_bounds
from megaindex.configs.megatron_versions import find_version
from megaindex.configs.run import Data, Evaluation, RunSettings, Source, Target
from megaindex.errors import FormatError
from megaindex.index.description import describe_stage, described_stages
from megaindex.index.frameworks import SPLITS
from megaindex.index.mixing import FixedMixing
from megaindex.index.order_settings import make_order, order_of
from megaindex.index.skips import read_skips
from megaindex.lock.shape import PATHS
from megaindex.recipe.layout import RecipeLayout, resolve_recipe
from megaindex.recipe.recipe import Recipe, RecipeStage
from megaindex.recipe.recipe_file import recipe_of, to_mapping
from megaindex.run.subset import map_leaves, skip_settings, with_files
from megaindex.validation import error_text

_MANY = 16  # streams of a stage that are written in columns
_WITHOUT = ("order", "data", "batch", "target", "evaluation", "version", "exact", "notes",
            "ignored", "coverage", "blend_counts", "skip")  # fmt: skip


def paths_of(run: Recipe | RunSettings) -> list[str]:
    """Return the prefixes of the pairs that a run names, each once."""
    sources: list[Any]
    if isinstance(run, Recipe):
        sources = [*run.sources, *([] if run.evaluation is None else [run.evaluation.source])]
    else:
        sources = [*run.data.train, *run.data.valid, *run.data.test]
    named = (getattr(source, name, "") for name in PATHS for source in sources)
    return list(dict.fromkeys(path for path in named if path))


def files_of(run: Recipe | RunSettings) -> list[str]:
    """Return the paths of the files of documents and of mix changes, each once."""
    named = [skip.documents for skip in run.skip if isinstance(skip.documents, str)]
    if isinstance(run, Recipe) and run.mix_changes is not None and run.mix_changes.path:
        named.append(run.mix_changes.path)
    if isinstance(run, Recipe) and run.past is not None:
        named += [read.documents for read in run.past.read if read.documents]
    return list(dict.fromkeys(named))


def settings_of(
    run: Recipe | RunSettings,
    rows: Mapping[str, int],
    opened: OpenRecipe | None,
    files: Mapping[str, int] | None = None,
) -> Any:
    """Return the settings of a run, with the rows of pairs and of other files by their paths."""
    named = files or {}
    skip = {"skip": skip_settings(run.skip, named)} if run.skip else {}
    if isinstance(run, Recipe):
        assert opened is not None, "of a recipe"
        recipe = {**_recipe_settings(opened, rows), **skip}
        if run.mix_changes is not None:
            row = named[run.mix_changes.path]
            recipe["mix_changes"] = {**recipe["mix_changes"], "file": row}
        for read in _documents_read(recipe):
            read["documents"] = named[read["documents"]]
        return {"kind": "recipe", "recipe": recipe}
    return {"kind": "run", "run": {**_run_settings(run, rows), **skip}}


def read_run(
    settings: Mapping[str, Any],
    index: Any,
    paths: Sequence[str],
    where: str,
    files: Sequence[str] = (),
) -> Any:
    """Return what `settings_of` was given, or raise FormatError that names ``where``.

    ``index`` is the description of the train subset's index, whose shares the settings may refer
    to; ``paths`` and ``files`` are those of the lock's rows.
    """
    try:
        if settings["kind"] == "recipe":
            mapping = _with_paths(settings["recipe"], paths)
            if "skip" in mapping:
                mapping["skip"] = with_files(mapping["skip"], files)
            if "mix_changes" in mapping:
                changes = mapping["mix_changes"]
                mapping["mix_changes"] = {**changes, "file": files[changes["file"]]}
            for read in _documents_read(mapping):
                read["documents"] = files[read["documents"]]
            _write_out_mixes(mapping, index)
            return recipe_of(mapping, where, Path("/"))
        if settings["kind"] != "run":
            raise ValueError(f"unknown kind {settings['kind']!r}")
        return _run_of(_with_paths(settings["run"], paths), files)
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
        reason = error_text(error)
        raise FormatError(
            f"{where}: its settings cannot be read ({reason}); restore the file, or lock the run "
            "again"
        ) from None


def step_bounds_by_settings(
    run: Recipe | RunSettings, subset: Mapping[str, Any], name: str, cache_dir: Any = None
) -> I64:
    """Return int64[steps + 1], the bounds of the steps that the batches of a run's settings make of
    the positions of a subset of its lock; no index is built."""
    if name != "train":
        size = subset["samples"] if isinstance(run, Recipe) else run.evaluation.batch_size
        schedule = BatchSchedule.constant(size or run.nominal_batch)  # type: ignore[union-attr]
        return step_bounds(schedule, 0, subset["samples"])[0]
    index = subset["index"]
    end = index["end"] if index["order"] == "skipped" else subset["samples"]
    if isinstance(run, Recipe):
        layout = open_recipe(replace(run, skip=()), cache_dir=cache_dir).layout
        schedule, skip = layout.batch, run.skip
        bounds, is_padded = layout.step_bounds(), layout.samples_masked > 0
    else:
        schedule, is_padded = run.batch, run.tail == "pad"
        bounds, _ = step_bounds(schedule, run.consumed_samples, end)
        skip = run.skips(bounds.size - 1)
    steps = skip_steps(
        skip, schedule, bounds, num_samples=int(bounds[-1]), masked_rows=int(is_padded)
    )
    return bounds if steps is None else steps.bounds


def _documents_read(recipe: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the parts of a past that are known by documents."""
    read = recipe.get("past", {}).get("read", {})
    return [each for each in read.values() if "documents" in each]


def _with_rows(value: Any, rows: Mapping[str, int]) -> Any:
    """Return JSON values with rows in place of paths, and text in place of other numbers."""
    return map_leaves(
        value, lambda key, each: rows[each] if key in PATHS and each in rows else _plain(each)
    )


def _plain(value: Any) -> Any:
    """Return a number as text, unless it is an integer: "0.3", "1/3"."""
    if isinstance(value, Fraction):
        return f"{value.numerator}/{value.denominator}"
    return repr(value) if isinstance(value, float) else value


def _with_paths(value: Any, paths: Sequence[str]) -> Any:
    return map_leaves(
        value, lambda key, each: paths[each] if key in PATHS and type(each) is int else each
    )


def _recipe_settings(opened: OpenRecipe, rows: Mapping[str, int]) -> dict[str, Any]:
    recipe = opened.layout.recipe
    mapping: dict[str, Any] = _with_rows(to_mapping(recipe), rows)
    many = [stage for stage in recipe.stages if len(stage.streams) > _MANY and _is_plain(stage)]
    shares = _stage_shares(opened, [stage for stage in many if stage.weighting is None])
    for stage in many:
        numbers: list[int] | None = [recipe.number(stream.source) for stream in stage.streams]
        if numbers == list(range(len(recipe.sources))):
            numbers = None
        mix: dict[str, Any] = {"sources": numbers}
        if stage.name in shares:
            mix["proportions"] = {"shares_of_stage": shares[stage.name]}
        elif stage.weighting is None:
            mix["proportions"] = [str(stream.proportion) for stream in stage.streams]
        mapping["stages"][stage.name]["mix"] = mix
    return mapping


def _is_plain(stage: RecipeStage) -> bool:
    """Return True if streams have proportions, or all of them are weighted, and nothing else."""
    return stage.by_proportion and not any(stream.restart for stream in stage.streams)


def _stage_shares(opened: OpenRecipe, stages: Sequence[RecipeStage]) -> dict[str, int]:
    """Return for each stage the number of its first piece in the description of the index.

    Empty unless the run is the same with the shares of those pieces as proportions.
    """
    layout = opened.layout
    firsts = {piece.name: number for number, piece in reversed(list(enumerate(layout.stages)))}
    found, changed = {}, {stage.name: stage for stage in layout.recipe.stages}
    for stage in stages:
        first = layout.stages[firsts[stage.name]] if stage.name in firsts else None
        if (
            first is not None
            and isinstance(first.mixing, FixedMixing)
            and len(first.mixed.sources) == len(stage.streams)
        ):
            found[stage.name] = firsts[stage.name]
            changed[stage.name] = _by_shares(stage, first.mixing.shares)
    other = replace(layout.recipe, stages=tuple(changed.values()))
    return found if found and _same_run(opened, resolve_recipe(other, layout.sizes)) else {}


def _same_run(opened: OpenRecipe, other: RecipeLayout) -> bool:
    """Return True if a layout of the same sources has the same samples and steps."""
    layout = opened.layout
    described = []
    for planned in (layout, other):
        size = len(planned.sizes)
        described.append([describe_stage(each.mixed, size) for each in planned.stages])
    same = ("num_steps", "samples_masked", "ends", "stopped_by")
    return described[0] == described[1] and all(
        getattr(layout, name) == getattr(other, name) for name in same
    )


def _by_shares(stage: RecipeStage, shares: Sequence[int]) -> RecipeStage:
    pairs = zip(stage.streams, shares, strict=True)
    streams = (replace(stream, proportion=Fraction(share)) for stream, share in pairs)
    return replace(stage, streams=tuple(streams))


def _write_out_mixes(mapping: Mapping[str, Any], index: Any) -> None:
    """Replace the mixes that are written in columns."""
    names = list(mapping["sources"])
    for stage in mapping["stages"].values():
        mix = stage.get("mix", {})
        if not _is_columns(mix):
            continue
        numbers = range(len(names)) if mix["sources"] is None else mix["sources"]
        given = mix.get("proportions", [None] * len(numbers))
        if isinstance(given, dict):
            given = described_stages(index)[given["shares_of_stage"]]["shares"]
        stage["mix"] = {names[n]: value for n, value in zip(numbers, given, strict=True)}


def _is_columns(mix: Mapping[str, Any]) -> bool:
    """Return True if the sources are a list; of a mix by name, ``sources`` would be a stream."""
    return "sources" in mix and (mix["sources"] is None or isinstance(mix["sources"], list))


def _run_settings(run: RunSettings, rows: Mapping[str, int]) -> dict[str, Any]:
    order = order_of(run.order)
    changed = order.changed_settings
    if not run.depends_on_python:
        changed.pop("python_sum", None)
    data = _all(run.data, SPLITS)
    for split in SPLITS:
        if sources := [_changed(source) for source in getattr(run.data, split)]:
            data[split] = sources
    found = {
        "order": {"name": order.name, **changed},
        **_all(run, _WITHOUT),
        "data": data,
        "batch": _all(run.batch),
        "target": _all(run.target),
        "evaluation": _all(run.evaluation),
        "version": None if run.version is None else run.version.name,
    }
    plain: dict[str, Any] = _with_rows(found, rows)
    return plain


def _all(value: Any, left_out: Sequence[str] = ()) -> dict[str, Any]:
    """Return the fields of a dataclass, also those with defaults, which may change."""
    names = [field.name for field in fields(value) if field.name not in left_out]
    return {name: getattr(value, name) for name in names}


def _changed(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass that differ from their defaults."""
    defaults = {field.name: field.default for field in fields(value)}
    return {name: each for name, each in _all(value).items() if each != defaults[name]}


def _run_of(given: Mapping[str, Any], files: Sequence[str]) -> RunSettings:
    values = dict(given)
    skip = with_files(values.pop("skip", ()), files)
    order = {key: _number(each) for key, each in values.pop("order").items()}
    name = order.pop("name")
    data, version = values.pop("data"), values.pop("version")
    sources: dict[str, Any] = {
        split: tuple(Source(**_numbers(source, "weight")) for source in data.pop(split, ()))
        for split in SPLITS
    }
    target = values.pop("target")
    return RunSettings(
        order=make_order(name, order),
        data=Data(**sources, **_numbers(data, "documents_alpha")),
        batch=BatchSchedule(**_tuples(values.pop("batch"))),
        target=Target(
            kind=target["kind"],
            value=Fraction(target["value"]),
            per_source=tuple(map(Fraction, target.get("per_source", ()))),
        ),
        evaluation=Evaluation(**values.pop("evaluation")),
        version=None if version is None else find_version(version),
        skip=read_skips(skip, "skip", "/"),
        **_tuples(_numbers(values, "variance_buffer", "surplus")),
    )


def _number(value: Any) -> Any:
    """Return the number that `_plain` wrote as text; other values unchanged."""
    if not isinstance(value, str):
        return value
    with contextlib.suppress(ValueError):
        return Fraction(value) if "/" in value else float(value)
    return value


def _numbers(values: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {key: _number(each) if key in names else each for key, each in values.items()}


def _tuples(value: Any) -> Any:
    """Return the values of a mapping with tuples in place of lists."""
    if isinstance(value, dict):
        return {key: _tuples(each) for key, each in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def differences(theirs: Any, ours: Any, where: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield the places in JSON values that differ, with both values."""
    if isinstance(theirs, dict) and isinstance(ours, dict):
        for key in dict.fromkeys([*theirs, *ours]):
            yield from differences(theirs.get(key), ours.get(key), f"{where}.{key}".lstrip("."))
    elif isinstance(theirs, list) and isinstance(ours, list) and len(theirs) == len(ours):
        for number, pair in enumerate(zip(theirs, ours, strict=True)):
            yield from differences(*pair, f"{where}[{number}]")
    elif theirs != ours or type(theirs) is not type(ours):
        yield where, theirs, ours


def leaves(value: Any, where: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the place and the value of all plain values in JSON values."""
    if not isinstance(value, (dict, list)):
        yield where, value
        return
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, each in items:
        yield from leaves(each, f"{where}.{key}".lstrip("."))
