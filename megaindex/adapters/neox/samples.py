"""Samples of GPT-NeoX's GPT2Dataset."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import xxhash

from megaindex._types import I32, IntArray
from megaindex.adapters.neox.arrays import (
    NeoxRequest,
    PackedRequest,
    WholeDocumentsRequest,
    stamp_of,
)
from megaindex.adapters.neox.framework import framework
from megaindex.adapters.policy import Policy
from megaindex.arithmetic import epochs_for
from megaindex.builders.single import packing_order
from megaindex.cache.array_files import neox_base, short_files
from megaindex.cache.array_group import Fetched
from megaindex.cache.fingerprint import documents_setting
from megaindex.errors import InvalidArgument
from megaindex.format import IndexedDataset
from megaindex.index.array_index import ArrayIndex
from megaindex.index.blended_index import LazyIndex
from megaindex.index.documents import count_tokens
from megaindex.index.frameworks import (
    check_one_sample,
    check_total,
    framework_rules,
    select_documents,
)
from megaindex.index.order_settings import NeoxDocumentsOrder
from megaindex.index.orders.framework import PackingIndex, ShuffledOrder
from megaindex.index.spans import Index
from megaindex.loader.neox_dataset import NeoxDataset
from megaindex.validation import check_integer, check_setting

_EPOCHS_KEPT = 2  # epochs whose samples are read at the same time


@dataclass(kw_only=True)
class NeoxSamples:
    """The settings of a GPT2Dataset and its arrays, which `fetch` builds and `epoch` opens."""

    name: str
    data_prefix: str
    seq_length: int
    seed: int
    pack_impl: str
    allow_chopped: bool
    exact: bool
    requested: int | None
    """Requested samples; None if epochs are requested."""
    num_epochs: int | None
    documents: range | IntArray
    """Sequence ids."""
    text: IndexedDataset
    companions: Mapping[str, IndexedDataset | None]
    """Labels, rewards and references."""
    policy: Policy
    """The shuffling of the final epoch."""
    cache_dir: str | None = field(default_factory=lambda: framework().cache_dir)
    """Folder of the arrays; None: beside the corpus."""
    reshuffles: bool = False
    """True if sample n of n is the first one of a second epoch in another order."""
    longer: ArrayIndex | None = None
    """Longer arrays than those of the request, the same in every epoch."""
    _requests: dict[int, NeoxRequest[Any]] = field(default_factory=dict)
    _fetched: dict[int, Fetched] = field(default_factory=dict)
    _epochs: dict[int, NeoxDataset] = field(default_factory=dict)

    @property
    def num_samples(self) -> int:
        """Number of samples built for one epoch; the same for each epoch."""
        if self.longer is not None:
            return self.longer.num_samples
        return int(self.fetch().sidecar.arrays["shuffle_index"][1][0])

    def epochs_as_neox_counts(self, num_epochs: int) -> int:
        """Return the number of GPT-NeoX's line ``total number of epochs``, which it computes by the
        rule of packed for every packing."""
        if self.requested is None or self.pack_impl == "packed":
            return num_epochs
        chosen = self._chosen_documents(as_neox_counts=False)  # those that take no part included
        tokens = count_tokens(self.text.sequence_lengths, chosen)
        return epochs_for(self.requested, tokens, self.seq_length) if tokens else num_epochs

    @property
    def whole_documents(self) -> NeoxDocumentsOrder:
        """The order of whole documents, if pack_impl is not packed."""
        return NeoxDocumentsOrder(
            pack_impl=self.pack_impl,  # type: ignore[arg-type]
            allow_chopped=bool(self.allow_chopped),
            next_token=not self.exact,
        )

    def request(self, epoch: int = 0) -> NeoxRequest[Any]:
        """Return the request for the arrays of an epoch."""
        if epoch not in self._requests:
            self.seq_length = check_setting("seq_length", self.seq_length)
            self.seed = check_setting("seed", self.seed)
            if self.requested is not None:
                self.requested = check_integer("num_samples", self.requested)
            final = self.policy.row.separate_final_epoch
            if self.pack_impl != "packed" and self.policy.final_epoch:
                raise InvalidArgument(
                    f"{self.name}: separate_final_epoch {final} needs pack_impl packed, got "
                    f"{self.pack_impl}; leave it out of install()"
                )
            if self.requested is None and self.num_epochs is None:
                raise InvalidArgument(
                    f"{self.name}: neither samples nor epochs are asked for; give one of them"
                )
            packed = self.pack_impl == "packed"
            make = self._packed_request if packed else self._whole_documents_request
            self._requests[epoch] = make(epoch)
        return self._requests[epoch]

    def fetch(self, epoch: int = 0) -> Fetched:
        """Find or build the arrays of an epoch, without mapping them."""
        if epoch not in self._fetched:
            self._fetched[epoch] = self.request(epoch).fetch()
        return self._fetched[epoch]

    @property
    def is_fetched(self) -> bool:
        """True after the arrays of the first epoch were found or built."""
        return 0 in self._fetched

    def set_fetched(self, fetched: Fetched) -> None:
        """Set the arrays of the first epoch, fetched by a group."""
        self._fetched.setdefault(0, fetched)

    def epoch(self, number: int) -> NeoxDataset:
        """Return the samples of an epoch."""
        if self.longer is not None:
            return NeoxDataset(self.longer, self.text)
        opened = self._epochs.get(number)
        if opened is None:
            sidecar = self.fetch(number).sidecar
            opened = self._open(self.request(number).open(sidecar), sidecar.facts)
            for old in [e for e in self._epochs if 0 < e <= number - _EPOCHS_KEPT]:
                for kept in (self._epochs, self._fetched, self._requests):
                    kept.pop(old, None)
            self._epochs[number] = opened
        return opened

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes without requests and open arrays, which are made again."""
        return {**vars(self), "_requests": {}, "_epochs": {}}

    def _request_of(
        self,
        kind: type[NeoxRequest[Any]],
        epoch: int,
        mark: str,
        corpora: list[IndexedDataset],
        make_order: Callable[[], Any],
        **settings: Any,
    ) -> NeoxRequest[Any]:
        """Build the request for an epoch's arrays, under GPT-NeoX's name and ``mark``."""
        seed = self._epoch_seed(epoch)
        base = neox_base(
            self._array_prefix(), self.name, self.requested, self.seq_length, seed, self.pack_impl
        )
        decide = {
            "pack_impl": self.pack_impl,
            "num_samples": self.requested,
            "sequence_length": self.seq_length,
            "seed": seed,
            **settings,
        }
        return kind(
            files=short_files(base + ("_ac" if self.allow_chopped else "") + mark),
            text=self.text,
            make_order=make_order,
            settings=decide,
            stamp=[number for corpus in corpora for number in stamp_of(corpus)],
        )

    def _array_prefix(self) -> str:
        """Return the beginning of the arrays' names; in a folder of its own, with the corpus's."""
        if self.cache_dir is None:
            return self.data_prefix
        folder, name = os.path.split(os.path.abspath(self.data_prefix))
        mark = xxhash.xxh3_64_hexdigest(os.fsencode(folder))
        return os.path.join(self.cache_dir, f"{name}-{mark}")

    def _epoch_seed(self, epoch: int) -> int:
        """Return the seed of an epoch; the first is GPT-NeoX's own."""
        return (self.seed + epoch) % 2**32

    def _open(self, arrays: Mapping[str, Any], facts: Mapping[str, Any]) -> NeoxDataset:
        """Return the samples of an epoch, with labels, rewards and references."""
        shared: dict[str, Any] = {
            "order": "neox",
            "sequence_lengths": self.text.sequence_lengths,
            "sequence_length": self.seq_length,
            **arrays,
            **facts,
        }
        index: Index
        if self.pack_impl == "packed":
            index = ArrayIndex(**shared, add_extra_token=1)
        else:
            order = self.whole_documents
            index = PackingIndex(**shared, pack_impl=order.pack_impl, next_token=order.next_token)
        companions = {f"{name}_dataset": each for name, each in self.companions.items()}
        return NeoxDataset(index, self.text, **companions)

    def lazy_index(self) -> LazyIndex:
        """Return the index of the first epoch, its arrays mapped when a sample is located."""
        facts = self.fetch().sidecar.facts
        return LazyIndex(
            name=f"{self.data_prefix} ({self.name})",
            num_samples=self.num_samples,
            num_epochs=facts["num_epochs"],
            tokens_per_epoch=facts["tokens_per_epoch"],
            sequence_length=self.seq_length,
            add_extra_token=1,
            order="neox",
            has_arrays=self.pack_impl == "packed",
            open=self._first_index,
        )

    def _first_index(self) -> Index:
        return self.epoch(0).index

    def _packed_request(self, epoch: int) -> NeoxRequest[Any]:
        chosen = self._chosen_documents(as_neox_counts=False)
        return self._request_of(
            PackedRequest,
            epoch,
            self.policy.mark,
            [self.text],
            partial(self._packed_order, chosen, self._epoch_seed(epoch)),
            documents=documents_setting(chosen),
            num_epochs=self.num_epochs,
            **self.policy.final_epoch,
        )

    def _packed_order(self, chosen: range | I32, seed: int) -> ShuffledOrder:
        name = f"{self.data_prefix} ({self.name})"
        if isinstance(chosen, range) and chosen == range(len(self.text)):
            tokens = self.text.num_tokens
        else:
            tokens = count_tokens(self.text.sequence_lengths, chosen)
        if self.requested is None or tokens == 0:
            check_one_sample(name, tokens, self.seq_length, 1)
        order = ShuffledOrder(
            rules=self.policy.row,
            documents=chosen,
            sequence_length=self.seq_length,
            seed=seed,
            num_samples=self.requested or 0,
            num_epochs=self.num_epochs or epochs_for(self.requested or 0, tokens, self.seq_length),
            tokens_per_epoch=tokens,
        )
        check_total(name, order.total_tokens)
        return order

    def _whole_documents_request(self, epoch: int) -> NeoxRequest[Any]:
        labels = self.companions["label"]
        order = replace(self.whole_documents, label_dataset=labels)
        num_samples = order.check_num_samples(self.requested)
        chosen = self._chosen_documents(as_neox_counts=not self.exact)
        make_order = partial(
            packing_order, self.text, chosen, order, sequence_length=self.seq_length,
            seed=self._epoch_seed(epoch), num_samples=num_samples,
        )  # fmt: skip
        corpora = [self.text] if labels is None else [self.text, labels]
        return self._request_of(
            WholeDocumentsRequest,
            epoch,
            "_exact" if self.exact else "",
            corpora,
            make_order,
            documents=documents_setting(chosen),
            allow_chopped=self.allow_chopped,
            labels=labels is not None,
        )

    def _chosen_documents(self, *, as_neox_counts: bool) -> range | I32:
        """Return the documents; GPT-NeoX's packings of whole documents count them from 0."""
        if len(self.documents) and as_neox_counts:
            return range(len(self.documents))
        return select_documents(
            len(self.text), self.text.path_prefix, framework_rules("neox"), documents=self.documents
        )
