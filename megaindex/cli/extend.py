"""``megaindex extend``: a run goes past its planned end, and its past stays as it was.

The first options say how the old run was planned; its index is built again and pinned up to the
samples consumed. What it has not served follows, least-seen tokens first, then whole epochs.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from megaindex.cli.parser import Parser
from megaindex.errors import InvalidArgument

if TYPE_CHECKING:
    from megaindex.index.extended import ExtendedIndex
    from megaindex.index.spans import Index


def main(arguments: Sequence[str]) -> int:
    options = _parser().parse_args(arguments)
    _extend(options)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="megaindex extend", description=__doc__)
    old = parser.add_argument_group("how the old run was planned")
    old.add_argument("--data-path", required=True, metavar="P", help="prefix of .bin and .idx")
    old.add_argument("--seq-length", required=True, type=int, metavar="S")
    old.add_argument("--seed", type=int, default=1234, help="default: 1234, as the frameworks")
    old.add_argument("--order", default="megatron", help="default: megatron")
    length = old.add_mutually_exclusive_group(required=True)
    length.add_argument("--num-samples", type=int, metavar="N")
    length.add_argument("--epochs", metavar="E", help="such as 1, 1.5 or 3/2")
    old.add_argument("--split", help="such as 969,30,1; default: all documents")
    old.add_argument("--subset", default="train", choices=("train", "valid", "test"))
    old.add_argument(
        "--consumed-samples", type=int, metavar="C", help="default: all samples planned"
    )
    more = parser.add_argument_group("how far it goes on").add_mutually_exclusive_group(
        required=True
    )
    more.add_argument("--more-samples", type=int, metavar="N")
    more.add_argument("--more-epochs", metavar="E", help="such as 1, 1.5 or 3/2")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def _extend(options: argparse.Namespace) -> None:
    from megaindex.build import build_index
    from megaindex.format import IndexedDataset
    from megaindex.index.dialect import dialect
    from megaindex.index.extended import extend_index
    from megaindex.store.fingerprint import corpus_fingerprint

    dataset = IndexedDataset(options.data_path, dialect=dialect(options.order).file_dialect)
    settings: dict[str, Any] = {
        "sequence_length": options.seq_length,
        "order": options.order,
        "split": options.split,
        "subset": options.subset,
    }
    old = build_index(
        dataset,
        seed=options.seed,
        num_samples=options.num_samples,
        epochs=options.epochs,
        **settings,
    )
    consumed = _consumed(options, old)
    extended = extend_index(
        old,
        consumed_samples=consumed,
        more_samples=_more(options, old),
        seed=options.seed,
        further=lambda seed: build_index(dataset, seed=seed, epochs=1, **settings),
    )
    report = _report(options.order, old, extended, consumed, corpus_fingerprint(dataset))
    print(json.dumps(report) if options.json else _text(report))


def _consumed(options: argparse.Namespace, old: Index) -> int:
    from megaindex.index.arithmetic import samples_for_epochs
    from megaindex.index.plain import parse_fraction

    if options.consumed_samples is not None:
        return int(options.consumed_samples)
    if options.num_samples is not None:
        return int(options.num_samples)
    tokens, length, extra = old.tokens_per_epoch, old.sequence_length, old.add_extra_token
    planned = samples_for_epochs(parse_fraction(options.epochs), tokens, length, extra)
    return min(planned, old.num_samples)


def _more(options: argparse.Namespace, old: Index) -> int:
    from megaindex.index.plain import parse_fraction

    if options.more_samples is not None:
        return int(options.more_samples)
    try:
        epochs = parse_fraction(options.more_epochs)
    except ValueError:
        raise InvalidArgument(
            f"--more-epochs must be a positive number such as 1, 1.5 or 3/2, got "
            f"{options.more_epochs!r}"
        ) from None
    return int(epochs * old.tokens_per_epoch // old.sequence_length)


def _report(
    order: str, old: Index, extended: ExtendedIndex, consumed: int, fingerprint: str
) -> dict[str, Any]:
    from megaindex.index.extended import times_served
    from megaindex.index.ladder import planned_receipt
    from megaindex.index.receipt import fingerprint_keys

    keys = fingerprint_keys([fingerprint])
    before = planned_receipt(old, 0, consumed, keys)
    after = planned_receipt(extended, 0, consumed, keys)
    end = extended.num_samples
    in_order = times_served(old, end) if end <= old.num_samples else None
    return {
        "order": order,
        "consumed_samples": consumed,
        "more_samples": end - consumed,
        "from_the_old_index": len(extended.stages[1].samples),
        "further_epochs": [
            {"seed": seed, "samples": len(stage.samples)}
            for seed, stage in zip(extended.further_seeds, extended.stages[2:], strict=True)
        ],
        "coverage_before": _shares(times_served(old, consumed)),
        "coverage_after": _shares(times_served(extended, end)),
        "coverage_after_in_the_old_order": None if in_order is None else _shares(in_order),
        "receipt_of_the_past": before.to_dict(),
        "past_unchanged": before == after,
    }


def _shares(tokens: list[int]) -> dict[str, float]:
    return {f"seen_{k}": number / sum(tokens) for k, number in enumerate(tokens)}


def _text(report: dict[str, Any]) -> str:
    receipt = report["receipt_of_the_past"]
    same = "unchanged" if report["past_unchanged"] else "CHANGED"
    lines = [
        f"order {report['order']}: {report['consumed_samples']:,} samples consumed, receipt "
        f"{receipt['receipt']} ({same})",
        f"then {report['more_samples']:,} samples: {report['from_the_old_index']:,} that the old "
        "index holds and did not serve, least-seen tokens first",
    ]
    lines += [
        f"then {epoch['samples']:,} samples of a further epoch, seed {epoch['seed']}"
        for epoch in report["further_epochs"]
    ]
    lines.append("tokens by times served:")
    lines.append("  so far     " + _percentages(report["coverage_before"]))
    lines.append("  extended   " + _percentages(report["coverage_after"]))
    if report["coverage_after_in_the_old_order"] is not None:
        old = _percentages(report["coverage_after_in_the_old_order"])
        lines.append("  (the old order would give " + old + ")")
    return "\n".join(lines)


def _percentages(shares: dict[str, float]) -> str:
    return "  ".join(
        f"{name.removeprefix('seen_')}x {100 * share:.2f} %" for name, share in shares.items()
    )
