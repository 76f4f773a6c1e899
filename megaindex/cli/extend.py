"""Continue a run past its planned end, or change its blend, and keep the samples served so far.

The index of the old run is built again from its settings and kept up to the samples consumed. The
samples that it has not served follow, least-seen tokens first, then whole further epochs. With
--change, sources are drawn by the new weights from a position on; sources can be added and removed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from megaindex.cli.options import Parser, add_flags, order_of_flags
from megaindex.errors import InvalidArgument, visible
from megaindex.validation import DEFAULT_SEED

if TYPE_CHECKING:
    from megaindex.builders.extend import ExtendedRun
    from megaindex.settings.amended import BlendChange


def main(arguments: Sequence[str]) -> int:
    options = _parser().parse_args(arguments)
    from megaindex.builders.extend import amend_run, extend_run
    from megaindex.settings.run_builder import parse_buffer
    from megaindex.settings.sources import parse_blend

    sources = parse_blend(options.data_path, None, "--data-path")
    paths = [source.path for source in sources]
    weights = [source.weight for source in sources if source.weight is not None]
    blended = len(paths) > 1 or bool(weights)
    common: dict[str, Any] = {
        "sequence_length": options.seq_length,
        "seed": options.seed,
        "order": order_of_flags(options),
        "num_samples": options.num_samples,
        "weights": weights or None,
        "variance_buffer": parse_buffer(options.variance_buffer),
        "more_samples": options.more_samples,
        "split": options.split,
        "subset": options.subset,
    }
    corpora = paths if blended else paths[0]
    if options.change:
        run = amend_run(corpora, changes=_changes(options), **common)
        paths = [dataset.path_prefix for dataset in run.datasets]
    else:
        run = extend_run(
            corpora,
            epochs=options.epochs,
            consumed_samples=options.consumed_samples,
            more_epochs=options.more_epochs,
            **common,
        )
    report = _report(options.order, run, paths)
    print(json.dumps(report) if options.json else _text(report))
    return 0


def _changes(options: argparse.Namespace) -> list[BlendChange]:
    """Return the changes of ``--change``."""
    from megaindex.settings.amended import blend_change

    for flag in ("epochs", "consumed_samples", "more_epochs"):
        if getattr(options, flag) is not None:
            raise InvalidArgument(
                f"--{flag.replace('_', '-')} and --change exclude each other; a run with changes "
                "has --num-samples, the position in each --change, and --more-samples"
            )
    changes = []
    for position, *blend in options.change:
        if not position.isdecimal():
            raise InvalidArgument(
                f"--change {' '.join([position, *blend])}: write the samples consumed, then a "
                "weight and a prefix for each source, as in --change 64000 0.7 web 0.3 code"
            )
        changes.append(blend_change(int(position), blend, f"--change {position}"))
    return changes


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="megaindex extend", description=__doc__)
    old = parser.add_argument_group("settings of the old run")
    blend = "prefix of .bin and .idx, or a blend: P P … or w P w P …"
    add_flags(old, "--data-path", required=True, help=blend)
    add_flags(old, "--seq-length", required=True)
    add_flags(old, "--seed", default=DEFAULT_SEED)
    add_flags(old, "--order", default="megatron")
    length = old.add_mutually_exclusive_group(required=True)
    add_flags(length, "--num-samples", help="samples of the run: train_iters x batch size")
    add_flags(length, "--epochs", help="of one source, such as 1, 1.5 or 3/2")
    add_flags(old, "--variance-buffer", "--split", "--subset", "--max-documents", "--align")
    add_flags(old, "--long-documents")
    old.add_argument(
        "--consumed-samples", type=int, metavar="C", help="served so far; default: all planned"
    )
    old.add_argument(
        "--change", action="append", nargs="+", metavar="C", default=[],
        help="C W P [W P …]: from C consumed samples on, the blend of these weights and prefixes; "
        "can be given several times",
    )  # fmt: skip
    more = parser.add_argument_group("extension").add_mutually_exclusive_group()
    more.add_argument(
        "--more-samples", type=int, metavar="N",
        help="samples to add; with --change those after the last change, by default up to the "
        "planned end",
    )  # fmt: skip
    more.add_argument("--more-epochs", metavar="E", help="epochs to add, such as 1, 1.5 or 3/2")
    add_flags(parser, "--json")
    return parser


def _report(order: str, run: ExtendedRun, paths: Sequence[str]) -> dict[str, Any]:
    from megaindex.cache.fingerprint import corpus_fingerprint
    from megaindex.index.extension import times_served
    from megaindex.index.receipts import fingerprint_keys, planned_receipt

    old, extended, consumed = run.old, run.index, run.consumed_samples
    keys = fingerprint_keys([corpus_fingerprint(dataset) for dataset in run.datasets])
    before = planned_receipt(old, 0, consumed, keys)
    after = planned_receipt(extended, 0, consumed, keys)
    end = extended.num_samples
    in_order = times_served(old, end) if run.old_reaches and not run.stages else None
    sources = [
        _source(path, served, source)
        for path, served, source in zip(paths, run.served, run.sources, strict=True)
    ]
    if run.stages:
        _count_reads(sources, run)
    return {
        "order": order,
        "consumed_samples": consumed,
        "more_samples": end - consumed,
        "from_the_old_index": sum(source["from_the_old_index"] for source in sources),
        "further_epochs": [
            {"source": source["data_path"], **epoch}
            for source in sources
            for epoch in source["further_epochs"]
        ],
        "coverage_before": _shares(times_served(old, consumed)),
        "coverage_after": _shares(times_served(extended, end)),
        "coverage_after_in_the_old_order": None if in_order is None else _shares(in_order),
        "receipt_of_the_past": before.to_dict(),
        "past_unchanged": before == after,
        "sources": sources,
        **({"changes": _stages(run, paths)} if run.stages else {}),
    }


def _count_reads(sources: Sequence[dict[str, Any]], run: ExtendedRun) -> None:
    """Set the samples that each source has left, or of the first epoch of a new source."""
    built = run.built
    for number, (row, (begin, stop)) in enumerate(zip(sources, run.reads, strict=True)):
        row["from_the_old_index"] = 0
        if number < len(built):
            row["from_the_old_index"] = min(stop, built[number]) - begin
        else:
            further = sum(epoch["samples"] for epoch in row["further_epochs"])
            row["from_its_first_epoch"] = stop - begin - further


def _stages(run: ExtendedRun, paths: Sequence[str]) -> list[dict[str, Any]]:
    """Return the draws after each change."""
    found: list[dict[str, Any]] = []
    begin = run.consumed_samples
    for stage in run.stages:
        samples = {paths[number]: end - first for number, first, end in stage.reads()}
        found.append({"first_sample": begin, "samples": stage.num_samples, "sources": samples})
        begin += stage.num_samples
    return found


def _source(path: str, served: int, index: Any) -> dict[str, Any]:
    """Return a source's samples before and after the extension; 0 if its index is unchanged."""
    first, *epochs = getattr(index, "stretches", (None,))
    return {
        "data_path": path,
        "consumed_samples": served,
        "from_the_old_index": 0 if first is None else first.num_samples - served,
        "further_epochs": [
            {"seed": seed, "samples": stretch.num_samples}
            for seed, stretch in zip(getattr(index, "further_seeds", ()), epochs, strict=True)
        ],
    }


def _shares(tokens: list[int]) -> dict[str, float]:
    return {f"seen_{k}": number / sum(tokens) for k, number in enumerate(tokens)}


def _text(report: dict[str, Any]) -> str:
    receipt = report["receipt_of_the_past"]
    same = "unchanged" if report["past_unchanged"] else "CHANGED"
    unserved = f"{report['from_the_old_index']:,} unserved ones of the old index"
    new = sum(source.get("from_its_first_epoch", 0) for source in report["sources"])
    lines = [
        f"order {report['order']}: {report['consumed_samples']:,} samples consumed, receipt "
        f"{receipt['receipt']} ({same})",
        f"then {report['more_samples']:,} samples: {unserved}, least-seen tokens first"
        + (f", and {new:,} of the first epoch of new sources" if new else ""),
    ]
    for change in report.get("changes", ()):
        drawn = ", ".join(f"{count:,} of {path}" for path, count in change["sources"].items())
        lines.append(f"from sample {change['first_sample']:,}: {drawn}")
    lines += [
        f"then {epoch['samples']:,} samples of a further epoch"
        + (f" of {epoch['source']}" if len(report["sources"]) > 1 else "")
        + f", seed {epoch['seed']}"
        for epoch in report["further_epochs"]
    ]
    lines.append("tokens by times served:")
    lines.append("  so far     " + _percentages(report["coverage_before"]))
    lines.append("  extended   " + _percentages(report["coverage_after"]))
    if report["coverage_after_in_the_old_order"] is not None:
        old = _percentages(report["coverage_after_in_the_old_order"])
        lines.append("  (the old order would give " + old + ")")
    return "\n".join(map(visible, lines))


def _percentages(shares: dict[str, float]) -> str:
    return "  ".join(
        f"{name.removeprefix('seen_')}x {100 * share:.2f} %" for name, share in shares.items()
    )
