"""The place and state of a sampler, and the ranks that it serves.

The state of a sampler holds how many samples were consumed and what the order of samples depends
on. It is the same on every rank. Going on is refused where it would change what was served or what
comes next: the order of another corpus, another kind of sampler, and the like. Each refusal has a
name, and `allow` takes the names of those that are meant.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from megaindex.errors import InvalidArgument
from megaindex.validation import CheckpointReader, check_between, make_plain, shown

VERSION = 1


@dataclass(frozen=True, kw_only=True)
class RankLayout:
    """The data-parallel ranks, and which of them this is."""

    micro_batch_size: int
    data_parallel_rank: int
    data_parallel_size: int

    def __post_init__(self) -> None:
        make_plain(self, "micro_batch_size", "data_parallel_rank", "data_parallel_size")
        check_between("data_parallel_rank", self.data_parallel_rank, 0, self.data_parallel_size - 1)

    @property
    def rows_per_round(self) -> int:
        """Rows of one micro batch on every rank."""
        return self.micro_batch_size * self.data_parallel_size


@dataclass(frozen=True)
class LoaderPosition:
    """Where a run stands, over all ranks."""

    consumed_samples: int = 0
    """Samples served, padding not counted: the position of the next."""
    rows_left: int = 0
    """Rows of the step under way that are still to be served; 0 between steps."""


class Resumable(ABC):
    """A sampler with torch's ``state_dict`` protocol, which torchdata's StatefulDataLoader uses.

    An iteration starts where the sampler was set to start: by its arguments or `load_state_dict`.
    """

    kind: ClassVar[str]
    _ranks: RankLayout
    _start: LoaderPosition
    _place: LoaderPosition

    @property
    def ranks(self) -> RankLayout:
        """The ranks, and which of them this sampler serves."""
        return self._ranks

    @property
    @abstractmethod
    def _order(self) -> dict[str, Any]:
        """The values that the order of samples depends on: JSON values by name."""

    @abstractmethod
    def _check_fields(self, stored: CheckpointReader) -> None:
        """Raise FormatError where a state of this kind holds a value that no such sampler wrote."""

    @abstractmethod
    def _check_place(self, place: LoaderPosition) -> None:
        """Raise InvalidArgument where this sampler cannot start at ``place``."""

    @abstractmethod
    def _refusals(
        self, place: LoaderPosition, stored: Mapping[str, Any]
    ) -> Iterator[tuple[str, str]]:
        """Yield name and reason of each difference that forbids going on from ``place`` of a run of
        order ``stored``."""

    @abstractmethod
    def _place_after(self, micro_batches: int) -> LoaderPosition:
        """Return the place after ``micro_batches`` were served on every rank."""

    @abstractmethod
    def __len__(self) -> int:
        """Number of micro batches of an iteration, the same on every rank."""

    @abstractmethod
    def _micro_batches(self) -> Iterator[list[int | None]]:
        """Yield the micro batches from the start on; sets ``_place`` before each."""

    def __iter__(self) -> Iterator[list[int | None]]:
        self._place = self._start
        return self._micro_batches()

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the last micro batch that was taken from this sampler.

        StatefulDataLoader keeps one for each batch it reads ahead, and returns that of the batch it
        yielded last. A plain DataLoader with workers does not: use `state_after` with it.
        """
        return self._state(self._place)

    def state_after(self, micro_batches: int) -> dict[str, Any]:
        """Return the state after this many micro batches, counted from the start.

        Raises:
            InvalidArgument: an iteration does not have that many.
        """
        micro_batches = check_between("micro_batches", micro_batches, 0, len(self))
        return self._state(self._place_after(micro_batches))

    def load_state_dict(self, state: Mapping[str, Any], *, allow: Collection[str] = ()) -> None:
        """Start where a run stood, here with this sampler's ranks and batch sizes.

        Args:
            allow: names of differences that do not forbid it, keys of the state.

        Raises:
            InvalidArgument: going on would change past or future; the message has reason and name.
            FormatError: not what `state_dict` gives.
        """
        place = self._parse(state)
        unknown = sorted(set(allow) - {"kind", *self._order})
        if unknown or isinstance(allow, str):
            raise InvalidArgument(
                f"allow holds names among kind, {', '.join(self._order)}; got {allow!r}"
            )
        for name, reason in self._differences(place, state):
            if name not in allow:
                raise InvalidArgument(
                    f"{reason}; go on with the settings of the checkpoint, or, if it is meant, "
                    f'load it with allow=("{name}",)'
                )
        self._check_place(place)
        self._start = self._place = place

    def _state(self, place: LoaderPosition) -> dict[str, Any]:
        return {"version": VERSION, "kind": self.kind, **vars(place), **self._order}

    def _differences(
        self, place: LoaderPosition, stored: Mapping[str, Any]
    ) -> Iterator[tuple[str, str]]:
        if stored["kind"] != self.kind:
            yield (
                "kind",
                f"the checkpoint is of a sampler of kind {shown(stored['kind'])}, this one is "
                f"{self.kind!r} and reads in another order",
            )
        ours = self._order["fingerprint"]
        if stored["fingerprint"] != ours:
            yield (
                "fingerprint",
                f"the checkpoint was made in the order {shown(stored['fingerprint'])}, this run "
                f"reads in the order {ours!r}",
            )
        yield from self._refusals(place, {**self._order, **stored})

    def _parse(self, state: Mapping[str, Any]) -> LoaderPosition:
        """Check every field of a state of any kind, and return its place."""
        stored = CheckpointReader("the state of a sampler", state)
        stored.check_version(VERSION)
        kind = stored.text("kind")
        if stored.field("fingerprint", "must be text or null") is not None:
            stored.text("fingerprint")
        stored.integer("num_samples")
        stored.integer("train_samples")
        if kind == self.kind:
            self._check_fields(stored)
        consumed, rows = stored.integer("consumed_samples"), stored.integer("rows_left")
        # what is left of a step of another kind are samples like all that follow
        return LoaderPosition(consumed, rows if kind == self.kind else 0)
