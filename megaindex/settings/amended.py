"""Training data of a run as it began, and how it went on: the file of ``install(amend=…)``."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megaindex.errors import InvalidArgument
from megaindex.io.paths import absolute
from megaindex.settings.sources import Source, parse_blend
from megaindex.settings.yaml_sections import Section, load_mapping
from megaindex.validation import (
    check_between,
    check_setting,
    check_weight,
    count_of,
)


@dataclass(frozen=True, kw_only=True)
class BlendChange:
    """Weights of a blend from a position on.

    Attributes:
        consumed_samples: samples served before the change, on all ranks together.
        weights: weight of each source that is drawn from then on, by its path prefix. Sources that
            are left out are not drawn until a later change names them; new ones begin.

    Raises:
        InvalidArgument: a number is out of range, or weights is empty.
    """

    consumed_samples: int
    weights: Mapping[str, float]

    def __post_init__(self) -> None:
        begin = check_between("consumed_samples of a change", self.consumed_samples, 0)
        object.__setattr__(self, "consumed_samples", begin)
        if not isinstance(self.weights, Mapping) or not self.weights:
            raise InvalidArgument(
                f"the change at sample {begin} must have a weight for each source, as in "
                "{'data/web': 0.7, 'data/code': 0.3}"
            )
        named = [absolute(os.fspath(path)) for path in self.weights]
        for name, (path, weight) in zip(named, self.weights.items(), strict=True):
            check_weight(f"the change at sample {begin}: the weight of {path}", weight)
            if named.count(name) > 1:
                raise InvalidArgument(
                    f"the change at sample {begin} lists {name} twice; list it once"
                )


@dataclass(frozen=True, kw_only=True)
class AmendedBlend:
    """The training data of a run as it began, and the changes of its blend since.

    Attributes:
        data_path: ``P``, ``P P …`` or ``w P w P …``, as in ``--data-path`` when the run began.
        num_samples: samples of training data requested then: train_iters × global batch size.
        changes: the changes, in order; the last one is the blend of today.
        consumed_samples: in place of changes, the samples after which the run is extended, see
            `megaindex.extend_run`; a lock takes it, the adapters do not.

    Raises:
        InvalidArgument: the data path mixes weights and bare paths, or neither changes nor
            consumed_samples is given.
    """

    data_path: Sequence[str | float]
    num_samples: int
    changes: Sequence[BlendChange] = ()
    consumed_samples: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_samples", check_setting("num_samples", self.num_samples))
        object.__setattr__(self, "changes", tuple(self.changes))
        if self.consumed_samples is not None:
            given, most = self.consumed_samples, self.num_samples
            consumed = check_between("amend: consumed_samples", given, 0, most)
            object.__setattr__(self, "consumed_samples", consumed)
        if bool(self.changes) == (self.consumed_samples is not None):
            raise InvalidArgument(
                "amend: changes is empty; give at least one BlendChange, or the consumed_samples "
                "after which the run is extended, and not both"
            )
        if not self.sources:
            raise InvalidArgument("amend: data_path is empty; give that of the run as it began")

    @property
    def sources(self) -> tuple[Source, ...]:
        """The sources of the run as it began."""
        given = self.data_path.split() if isinstance(self.data_path, str) else self.data_path
        return parse_blend([str(word) for word in given], None, "amend: data_path")

    @property
    def weights(self) -> list[float] | None:
        """Their weights; None without."""
        weights = [source.weight for source in self.sources if source.weight is not None]
        return weights or None

    @property
    def detail(self) -> str:
        """Number and last place of the changes, for logs."""
        last = self.changes[-1].consumed_samples
        return f"{count_of(len(self.changes), 'change')}, the last at sample {last}"

    def check_present(self, paths: Sequence[str], weights: Sequence[float] | None) -> None:
        """Check that today's settings name the blend of the last change.

        Raises:
            InvalidArgument: they name another one.
        """
        blend = [(source.path, source.weight) for source in self.sources]
        wanted = list(self.changes[-1].weights.items()) if self.changes else blend
        none: Sequence[float | None] = [None] * len(paths)
        given = list(zip(paths, none if weights is None else weights, strict=True))
        ours, theirs = _shares(given), _shares(wanted)
        near = all(math.isclose(ours.get(k, 0), theirs[k], rel_tol=1e-9) for k in theirs)
        if ours.keys() != theirs.keys() or not near:
            raise InvalidArgument(
                "amend: the data path of the framework must be that of the last change, "
                f"{_text(wanted)}, got {_text(given)}; change one of them"
            )

    @property
    def paths(self) -> list[str]:
        """Path prefixes of all sources, in the order in which they come."""
        named = [source.path for source in self.sources]
        return named + [os.fspath(path) for change in self.changes for path in change.weights]

    def placed(self) -> AmendedBlend:
        """Return the same with absolute paths; URLs stay."""
        blend = [(source.weight, absolute(source.path)) for source in self.sources]
        changes = [
            replace(each, weights={absolute(os.fspath(p)): w for p, w in each.weights.items()})
            for each in self.changes
        ]
        words = [word for pair in blend for word in pair if word is not None]
        return replace(self, data_path=words, changes=changes)

    def to_json(self) -> dict[str, Any]:
        """Return the attributes as JSON values, each source with its ``path``."""
        began = [(source.path, source.weight) for source in self.sources]
        return {
            "num_samples": self.num_samples,
            "consumed_samples": self.consumed_samples,
            "began": [{"path": path, "weight": weight} for path, weight in began],
            "changes": [
                {
                    "consumed_samples": each.consumed_samples,
                    "blend": [
                        {"path": os.fspath(p), "weight": float(w)} for p, w in each.weights.items()
                    ],
                }
                for each in self.changes
            ],
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> AmendedBlend:
        """Return what `to_json` returned; weights may be text."""
        pairs = [(each["weight"], each["path"]) for each in values["began"]]
        return cls(
            data_path=[word for pair in pairs for word in pair if word is not None],
            num_samples=values["num_samples"],
            consumed_samples=values["consumed_samples"],
            changes=[
                BlendChange(
                    consumed_samples=each["consumed_samples"],
                    weights={one["path"]: float(one["weight"]) for one in each["blend"]},
                )
                for each in values["changes"]
            ],
        )

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> AmendedBlend:
        """Return the amended blend in a YAML file, with the attributes as keys.

        A change is ``{consumed_samples: N, data_path: [w, P, …]}``. Relative paths are relative to
        the working directory, as in the frameworks.

        Raises:
            MissingFile, StorageError: the file cannot be read.
            InvalidArgument: a setting is unknown, missing or wrong.
        """
        top = Section(os.fspath(path), load_mapping(path, "amend"))
        top.known("data_path", "num_samples", "changes", "consumed_samples")
        consumed = top.integer("consumed_samples")
        changes = top.values.get("changes", [] if consumed is not None else None)
        if not isinstance(changes, list) or not all(isinstance(c, Mapping) for c in changes):
            raise top.error("changes", "a list of {consumed_samples: N, data_path: [w, P, …]}")
        samples = top.integer("num_samples")
        if samples is None:
            raise top.error("num_samples", "the samples requested as the run began")
        return cls(
            data_path=_words(top),
            num_samples=samples,
            consumed_samples=consumed,
            changes=[_change(Section(top.file, c, f"changes[{k}]")) for k, c in enumerate(changes)],
        )


def _shares(blend: Sequence[tuple[str, float | None]]) -> dict[str, float]:
    """Return the share of each source; -1 of each of several without weights."""
    total = sum(float(weight or 0) for _, weight in blend)
    if not total:
        return {absolute(os.fspath(path)): -1.0 if len(blend) > 1 else 1.0 for path, _ in blend}
    return {absolute(os.fspath(path)): float(weight or 0) / total for path, weight in blend}


def _text(blend: Iterable[tuple[str, float | None]]) -> str:
    return " ".join(f"{'' if weight is None else f'{weight} '}{path}" for path, weight in blend)


def _words(section: Section) -> list[str]:
    """Return the words of ``data_path``, given as a list or as text."""
    value = section.values.get("data_path")
    words = value.split() if isinstance(value, str) else value
    if not isinstance(words, list) or not words:
        raise section.error("data_path", "a list such as [0.7, web, 0.3, code]")
    return [str(word) for word in words]


def _change(section: Section) -> BlendChange:
    section.known("consumed_samples", "data_path")
    consumed = section.integer("consumed_samples")
    if consumed is None:
        raise section.error("consumed_samples", "the samples consumed before the change")
    return blend_change(consumed, _words(section), section.where)


def blend_change(consumed_samples: int, words: Sequence[str], where: str) -> BlendChange:
    """Return the change to the blend ``w P w P …``; InvalidArgument unless all have weights."""
    sources = parse_blend(words, None, where)
    weights = {s.path: s.weight for s in sources if s.weight is not None}
    if any(source.weight is None for source in sources):
        raise InvalidArgument(
            f"{where}: {' '.join(words)}: write a weight before every prefix, as in 0.7 web 0.3 "
            "code"
        )
    if len(weights) < len(sources):
        raise InvalidArgument(f"{where}: a prefix is listed twice; list it once")
    return BlendChange(consumed_samples=consumed_samples, weights=weights)
