"""Compute train_iters, epochs and coverage of a training run, exactly and ahead of time."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megaindex.cli.options import (
    Parser,
    add_flags,
    add_run,
    check_output,
    print_json,
    take_run,
)
from megaindex.errors import InvalidArgument, visible
from megaindex.settings.arguments import named_as_in_files, read_settings
from megaindex.settings.batch_schedule import parse_count
from megaindex.settings.run_builder import resolve
from megaindex.settings.run_settings import RunSettings
from megaindex.settings.settings import flag_of, settings_by_name

if TYPE_CHECKING:
    from megaindex.audit.balance import BalanceModel
    from megaindex.index.balance import CostModel
    from megaindex.index.skips import Skip
    from megaindex.loader.recipe_state import StoredRecipe
    from megaindex.lock.lock_file import Lock
    from megaindex.plan.model import Plan
    from megaindex.run.run import Run
    from megaindex.settings.recipe import Recipe

DEFAULT_COST_MODEL = "llama3-8b"
_NOT_SCALED = ("lock", "state", "balance", "cost_model", "context_parallel_partition", "mix_bounds")


def main(arguments: Sequence[str]) -> int:
    """Return 0, or 1 if ``--check`` found repeated or unseen data."""
    options = _parser().parse_args(arguments)
    take_run(options, "plan")
    from megaindex.door import in_words_of_files, make_plan
    from megaindex.progress import counting_samples

    if options.print_config and options.json:
        raise InvalidArgument("--print-config and --json exclude each other; give one of them")
    if options.scale is not None:
        return _plan_scaled(options)
    if options.out is not None or options.overwrite:
        raise InvalidArgument(
            "--out is the file of a scaled recipe, and --overwrite replaces it; give --scale, or "
            "leave them out"
        )
    cost = cost_model_of(options)
    options.skip = skips_of_options(options)
    with named_as_in_files(vars(options)), counting_samples() as progress:
        described = _described(options)
        plan: Plan = make_plan(described, progress=progress, **_asked(options))
        plan = in_words_of_files(plan, vars(options))
    balance = None
    counts_masked = plan.skip is not None and plan.skip.has_masks
    if cost is not None or (counts_masked and all(row.path for row in plan.rows("train"))):
        plan, balance = _modelled(plan, run_of(described), cost)
    if options.print_config:
        from megaindex.plan.export import export_settings

        print(export_settings(plan, described, options.print_config))
    else:
        _show(plan, balance, options)
    return _status(plan.check_failures, options)


def _plan_scaled(options: argparse.Namespace) -> int:
    """Print the plan of a share of a recipe, and write this recipe."""
    from megaindex.console import print_view
    from megaindex.plan.export import export_settings
    from megaindex.plan.scaled import ScaledPlan
    from megaindex.progress import counting_samples
    from megaindex.recipe.scale import scale_recipe, write_recipe

    if any(getattr(options, name) for name in _NOT_SCALED):
        others = ", ".join(map(flag_of, _NOT_SCALED))
        raise InvalidArgument(f"--scale is of a recipe alone; leave {others} out")
    if options.print_config and (options.out or options.overwrite):
        raise InvalidArgument(
            "--print-config prints the scaled recipe; leave --out and --overwrite out"
        )
    options.skip = skips_of_options(options)
    recipe = recipe_of(options, besides=("skip",))
    if recipe is None:
        raise InvalidArgument(
            "--scale is of a recipe; write the run as one, in an order of megaindex "
            "(--print-config recipe prints that of a run in a framework's order)"
        )
    scaled = scale_recipe(recipe, options.scale)
    part = f"{scaled.share.numerator}-{scaled.share.denominator}"
    out = options.out or f"{_stem(options)}-{part}.yaml"
    if not options.print_config:
        check_output("--out", out, ".yaml", ".yml", overwrite=options.overwrite)
    with counting_samples() as progress:
        found = ScaledPlan.of(recipe, scaled, progress, coverage=options.coverage)
    if options.print_config:
        print(export_settings(found.plan, scaled.recipe, options.print_config))
        return _status(found.plan.check_failures, options)
    write_recipe(scaled.recipe, out, overwrite=options.overwrite)
    if options.json:
        print_json({**found.to_json(), "recipe": out})
    else:
        print_view(found.view())
        print(f"wrote {visible(out)}, the recipe of this plan")
    return _status(found.plan.check_failures, options)


def _stem(options: argparse.Namespace) -> str:
    """Return the name of the file of a recipe without its ending."""
    named = next(value for name in _RECIPE_FILES if (value := getattr(options, name)))
    return Path(named if isinstance(named, str) else named[0]).stem


def _asked(options: argparse.Namespace) -> dict[str, Any]:
    """Return what is asked of a plan, beside its run."""
    asked = {"coverage": options.coverage, "mix_bounds": options.mix_bounds or None}
    if options.state:
        asked["consumed_samples"] = parse_count(options.consumed_samples, "--state")
    return {name: value for name, value in asked.items() if value is not None}


def _described(options: argparse.Namespace) -> Recipe | RunSettings | Run:
    """Return the settings or the run of a lock, the recipe of a file, or the settings of flags."""
    if options.lock:
        return _plan_of_lock(options)
    recipe = recipe_of(options, besides=("skip",))
    return resolve(read_settings(vars(options))) if recipe is None else recipe


def run_of(described: Recipe | RunSettings | Run) -> Run:
    """Return the decided run of a recipe or of settings, or the run given."""
    from megaindex.progress import counting_samples
    from megaindex.run.from_recipe import run_of_recipe
    from megaindex.run.from_settings import run_of_settings
    from megaindex.settings.recipe import Recipe

    with counting_samples() as progress:
        of_settings = partial(run_of_settings, progress=progress)
        makers: dict[type, Any] = {Recipe: run_of_recipe, RunSettings: of_settings}
        run: Run = makers.get(type(described), lambda each: each)(described)
    return run


def cost_model_of(options: argparse.Namespace) -> CostModel | None:
    """Return the cost model of --balance and --cost-model, or None if neither is given.

    Raises:
        InvalidArgument: it is unknown, or a partition has no model or no ranks to divide between.
    """
    text, ranks = options.cost_model, options.context_parallel_size or 1
    if text is None and options.balance:
        text = DEFAULT_COST_MODEL
    partition = options.context_parallel_partition
    if partition is not None and (text is None or ranks == 1):
        raise InvalidArgument(
            "--context-parallel-partition is of the modelled work; give --balance and a "
            "--context-parallel-size above 1, or leave it out"
        )
    if text is None:
        return None
    from megaindex.index.balance import CostModel

    cost = CostModel.parse(text, "--cost-model")
    return replace(cost, context_parallel_size=ranks, partition=partition or "document")


def _show(plan: Plan, balance: BalanceModel | None, options: argparse.Namespace) -> None:
    if options.json:
        print_json(plan.to_json() | ({} if balance is None else {"balance": balance.to_json()}))
        return
    from megaindex.console import print_view

    print_view(plan.view())
    if balance is not None:
        from megaindex.audit.render import print_balance

        print()
        print_balance(balance)


def _status(failures: Sequence[str], options: argparse.Namespace) -> int:
    """Return the exit status; with ``--check`` print the failures."""
    if not options.check:
        return 0
    for reason in failures:
        print(f"check: {reason}", file=sys.stderr)
    return int(bool(failures))


def _modelled(plan: Plan, stream: Run, cost: CostModel | None) -> tuple[Plan, BalanceModel | None]:
    """Return the plan with the tokens whose loss is masked, and the balance of the ranks."""
    from megaindex.audit.balance import model_balance

    if plan.skip is not None:
        names = [source.name for source in stream.sources]
        plan = replace(plan, skip=plan.skip.counted(stream.index, names))
    return plan, None if cost is None else model_balance(stream, cost)


def skips_of_options(options: argparse.Namespace) -> tuple[Skip, ...]:
    """Return the skips that flags describe.

    Raises:
        InvalidArgument: a flag is malformed, or lacks another.
        MissingFile, StorageError: the file of ``--skip`` cannot be read.
    """
    from megaindex.index.skips import Skip, read_skips

    found: list[Skip] = []
    if options.skip_steps:
        found.append(Skip(steps=" ".join(options.skip_steps), move=options.move_skipped))
    elif options.move_skipped:
        raise InvalidArgument("--move-skipped needs --skip-steps; give the steps as well")
    for given in options.skip_documents or ():
        path, source = ids_and_source(given)
        step, remove = options.skip_from_step, options.remove_skipped
        found.append(Skip(documents=path, source=source, from_step=step, remove=remove))
    for flag in ("skip_from_step", "remove_skipped"):
        if getattr(options, flag) not in (None, False) and not options.skip_documents:
            raise InvalidArgument(
                f"{flag_of(flag)} needs --skip-documents; give the file of their ids as well"
            )
    if options.skip_file:
        from megaindex.settings.yaml_sections import load_yaml

        content = load_yaml(options.skip_file, "--skip")
        if isinstance(content, Mapping) and set(content) == {"skip"}:
            content = content["skip"]
        found += read_skips(content, options.skip_file, Path(options.skip_file).parent)
    return tuple(found)


def ids_and_source(given: str) -> tuple[str, str | None]:
    """Return the file of document ids and the source of the text FILE or FILE:SOURCE."""
    path, colon, source = given.rpartition(":")
    return (given, None) if not colon or os.path.exists(given) else (path, source or None)


def recipe_of(options: argparse.Namespace, besides: Sequence[str] = ()) -> Recipe | None:
    """Return the recipe of a file that describes the whole run, or None without such a file.

    Settings named in ``besides`` may be given with it.
    """
    given = [name for name in _RECIPE_FILES if getattr(options, name)]
    if not given:
        return None
    maxtext = None
    if given == ["maxtext_config"]:
        maxtext = _read_recipe(given[0], options)
        if maxtext is None:  # in the order of Megatron-LM, with settings of `read_settings`
            return None
    allowed = {given[0], *_RECIPE_FILES[given[0]], *besides}
    others = [name for name in described_by(options) if name not in allowed]
    if others:
        one, other = map(flag_of, (given[0], others[0]))
        raise InvalidArgument(f"{one} describes the whole run, so does {other}; give one of them")
    recipe = maxtext or _read_recipe(given[0], options)
    more = getattr(options, "skip", None) or ()
    if recipe is None or not more:
        return recipe
    return replace(recipe, skip=(*recipe.skip, *more))


def described_by(options: argparse.Namespace) -> list[str]:
    """Return the names of the given flags that describe a run: files, then settings.

    How its coverage is planned describes none.
    """
    files = [*_RECIPE_FILES, "neox_config", "megatron_args", "script_args"]
    given = {name: getattr(options, name) for name in files}
    given |= vars(settings_by_name(vars(options)))
    missing: Collection[Any] = ("", (), [])
    return [
        name
        for name, value in given.items()
        if name != "coverage" and value is not None and value is not False and value not in missing
    ]


# files that describe a whole run, and the settings that may be given with each
_RECIPE_FILES: dict[str, tuple[str, ...]] = {
    "recipe": (),
    "state": (),
    "nanotron_config": (),
    "llm_foundry_config": ("world_size",),
    "maxtext_config": ("world_size",),
}


def _read_recipe(name: str, options: argparse.Namespace) -> Recipe | None:
    file = getattr(options, name)
    if name == "state":
        stored = _stored_run(file)
        options.consumed_samples = options.consumed_samples or str(stored.consumed_samples)
        return stored.recipe_here
    from megaindex.door import recipe_in

    return recipe_in(name, file, options.world_size)


def _stored_run(file: str) -> StoredRecipe:
    """Return the run in a checkpoint: the state of one rank, or a list of those of all ranks."""
    from megaindex.loader.receipts import join_states
    from megaindex.loader.recipe_state import StoredRecipe
    from megaindex.lock.lock_file import Lock
    from megaindex.verify.record_proof import read_record

    record = read_record(file)
    if isinstance(record, Lock):
        raise InvalidArgument(f"--state {file}: is a lock, not a checkpoint; use --lock")
    return StoredRecipe.read(record[0] if len(record) == 1 else join_states(record))


_USUAL = (
    "--seq-length", "--micro-batch-size", "--data-parallel-size",
    "--gradient-accumulation-steps", "--global-batch-size", "--epochs", "--train-iters",
    "--train-samples", "--train-tokens", "--order", "--variance-buffer", "--split", "--seed",
    "--tail",
)  # fmt: skip
"""Flags of a run that ``--help`` shows; ``--help-all`` shows all."""


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="megaindex plan", description=__doc__, allow_abbrev=False)
    lock = parser.add_argument_group("lock")
    lock.add_argument("--lock", metavar="FILE", help="the run of a lock, in place of its settings")
    parser.hide(lock)
    add_run_arguments(parser, _USUAL)
    add_subset(parser)
    parser.hide(add_balance_arguments(parser))
    group = parser.add_argument_group("output")
    add = group.add_argument
    add("--coverage", metavar="HOW", help="auto (default), exact, expected or none")
    add_flags(group, "--json")
    add("--print-config", metavar="F", help="print settings of neox or megatron, or a recipe")
    add("--check", action="store_true", help="exit 1 on repeated or unseen data")
    more = parser.add_argument_group("small runs, and counts")
    add = more.add_argument
    scale = "plan a recipe of this share of the tokens, with the same repetition, and write it"
    add("--scale", metavar="SHARE", help=scale)
    add("--out", metavar="FILE", help="of --scale; default: NAME-1-16.yaml")
    add_flags(more, "--overwrite", help="replace the file of --out")
    add("--blend-counts", metavar="HOW", help="auto (default), exact or bounds")
    add("--mix-bounds", action="store_true", help="first step at which any mix can repeat a source")
    parser.hide(more)
    return parser


def add_run_arguments(parser: Parser, usual: Sequence[str] = ()) -> None:
    """Add the flags that describe a run, shared by the verbs; those not ``usual`` are hidden."""
    add_run(parser)
    for title, add in (
        ("data", _add_data),
        ("batch size", _add_batch),
        ("target (exactly one)", _add_target),
        ("skips (steps count from 0)", _add_skips),
        ("order, evaluation and framework settings", _add_rest),
    ):
        group = parser.add_argument_group(title)
        add(group)
        parser.hide(group, usual)
    if not usual:
        parser.epilog = "The flags of a run's settings are those of megaindex plan."


def add_subset(parser: Parser) -> None:
    """Add ``--subset``, which other verbs have for a split, as a short --document-subset."""
    parser.add_argument("--subset", dest="document_subset", help=argparse.SUPPRESS)


def add_balance_arguments(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Add the flags that model the work of rows, shared by plan and audit."""
    group = parser.add_argument_group("balance")
    add = group.add_argument
    add("--balance", action="store_true", help="model the work of rows, and the time ranks wait")
    add(
        "--cost-model",
        metavar="M",
        help=f"llama3-8b, llama3-70b, mixtral-8x7b or LINEAR:ATTENTION; default of --balance: "
        f"{DEFAULT_COST_MODEL}",
    )
    add(
        "--context-parallel-partition",
        choices=("document", "row"),
        help="what the ranks of --context-parallel-size divide in the model: each document "
        "(default), or the row",
    )
    return group


def _add_data(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add_flags(group, "--recipe")
    add("--state", metavar="FILE", help="checkpoint of a recipe's loader, in JSON")
    add("--nanotron-config", metavar="FILE", help="Nanotron config with data_stages, in YAML")
    add("--llm-foundry-config", metavar="FILE", help="LLM-Foundry config, in YAML")
    words = "MaxText configs, merged in order, and words key=value"
    add("--maxtext-config", nargs="+", metavar="FILE", help=words)
    add("--neox-config", nargs="+", metavar="FILE", help="GPT-NeoX configs, merged in order")
    add("--megatron-args", metavar="ARGS", help="arguments of Megatron-LM, or its launch script")
    add("--script-args", nargs="+", metavar="W", help="$1, $2, … of the script")
    add("--framework-version", metavar="V", help="of Megatron-LM: 0.16.1 or main")
    blend = "P, P P … or w P w P …: prefixes of .bin and .idx, or URLs (s3://, gs://, az://)"
    add_flags(group, "--data-path", help=blend)
    for subset in ("train", "valid", "test"):
        add(f"--{subset}-data-path", nargs="+", metavar="P", help=f"data of {subset} alone")
    add("--tokens-per-epoch", nargs="+", metavar="T", help="tokens of each source, without files")
    meaning = "lengths and numbers of documents of each source, without files"
    add("--length-histogram", nargs="+", metavar="FILE", help=meaning)
    add("--weights", nargs="+", metavar="w", help="one for each source")
    names = "orders epoch, window, packed: one for each source; default: its fingerprint"
    add("--shuffle-names", nargs="+", metavar="NAME", help=names)
    add_flags(group, "--split", "--seq-length")
    share = "orders epoch, window, packed: share of each source's tokens in an epoch, as 1/16"
    add("--document-subset", metavar="SHARE", help=share)
    add("--held-out", metavar="SHARE", help="share of the tokens that training leaves out")
    add("--subset-seed", type=int, metavar="N", help="of the choice of these documents; default: 0")


def _add_numbers(group: argparse._ArgumentGroup, **meanings: str) -> None:
    for name, meaning in meanings.items():
        flag = f"--{name.replace('_', '-')}"
        group.add_argument(flag, type=int, metavar="N", help=meaning)


def _add_batch(group: argparse._ArgumentGroup) -> None:
    _add_numbers(
        group,
        micro_batch_size="samples of one forward pass on one rank",
        data_parallel_size="number of model replicas",
        gradient_accumulation_steps="default: 1",
        global_batch_size="samples of one iteration",
        world_size="number of GPUs, in place of the data-parallel size",
        tensor_model_parallel_size="default: 1",
        pipeline_model_parallel_size="default: 1",
        context_parallel_size="default: 1",
    )
    add, ramp = group.add_argument, ("START", "INC", "SAMPLES")
    add("--batch-schedule", metavar="'0:768 250B:1536'", help="batch size by tokens consumed")
    add("--rampup-batch-size", nargs=3, type=int, metavar=ramp, help="as in Megatron-LM")


def _add_target(group: argparse._ArgumentGroup) -> None:
    add_flags(group, "--epochs", help="such as 1, 1.5 or 3/2; E,E,… one for each source")
    group.add_argument("--train-iters", type=int, metavar="I", help="number of iterations")
    group.add_argument("--train-samples", metavar="N", help="number of samples")
    group.add_argument("--train-tokens", metavar="N", help="number of tokens, such as 300B")


def _add_skips(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    several: Any = {"nargs": "+", "action": "extend"}
    add("--skip-steps", **several, metavar="A-B", help="steps not trained on, as 1200-1249 1300")
    add("--move-skipped", action="store_true", help="serve their samples behind the end")
    ids = "ids whose loss is masked: .npy or text, and the source in a blend"
    add("--skip-documents", **several, metavar="FILE[:SOURCE]", help=ids)
    add("--skip-from-step", type=int, metavar="N", help="first step with the mask; default: 0")
    add("--remove-skipped", action="store_true", help="remove the documents: no token is input")
    add("--skip", dest="skip_file", metavar="FILE", help="skips in YAML, as in a recipe")


def _add_rest(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add_flags(group, "--order", "--variance-buffer", "--seed")
    add("--mid-level-dataset-surplus", metavar="X", help="Megatron-LM: variance buffer - 1")
    add("--tail", help="partial last batch: drop (default), pad or wrap")
    _add_numbers(
        group,
        eval_interval="iterations between evaluations; default: 1000",
        eval_iters="batches of one evaluation; default: 100",
        eval_global_batch_size="default: as in training",
        eval_micro_batch_size="default: as in training",
        start_eval_at_iter="first iteration that evaluates",
    )
    for flag, meaning in (
        ("--skip-train", "Megatron-LM: evaluate once, without training"),
        ("--full-validation", "Megatron-LM: evaluate on the whole validation data"),
        ("--multiple-validation-sets", "Megatron-LM: evaluate on each source by itself"),
    ):
        add(flag, action="store_true", default=None, help=meaning)
    add("--dataloader-type", metavar="HOW", help="Megatron-LM: single or cyclic")
    add("--consumed-samples", metavar="N", help="samples of a run served so far")
    megatron = "as in Megatron-LM"
    skipped = "as in Megatron-LM: iterations from 0, since 0.17 from 1"
    add("--iterations-to-skip", nargs="+", type=int, metavar="N", help=skipped)
    add("--phase-transition-iterations", nargs="+", type=int, metavar="N", help=megatron)
    add("--separate-final-epoch", metavar="HOW", help="shuffle it apart: auto, always or never")
    add("--final-epoch-threshold", type=float, metavar="X", help="default: 0.8")
    add("--train-data-exact-num-epochs", type=int, metavar="E", help="epochs of the index")
    add("--epochs-mixed", type=int, metavar="K", help="order epoch: epochs shuffled together")
    add("--left-over", metavar="HOW", help="order epoch: drop (default) or carry")
    add_flags(group, "--max-documents", "--long-documents", "--align")
    summed = "GPT-NeoX's sum of weights: plain (Python 3.11) or compensated (3.12); default: this"
    add("--python-sum", metavar="HOW", help=summed)


def run_of_options(options: argparse.Namespace) -> Run:
    """Return the stream of a lock, a recipe or a run that flags describe."""
    from megaindex.progress import counting_samples
    from megaindex.run.from_recipe import run_of_recipe
    from megaindex.run.from_settings import run_of_settings

    if options.lock:
        return _run_of_lock(options)
    options.skip = skips_of_options(options)
    recipe = recipe_of(options, besides=("consumed_samples", "skip"))
    if recipe is None:
        with named_as_in_files(vars(options)), counting_samples() as progress:
            run = resolve(read_settings(vars(options)))
            return run_of_settings(
                run, subset=options.subset, cache_dir=options.cache_dir, progress=progress
            )
    if options.subset != "train":
        return _evaluation_of(recipe, options)
    consumed = parse_count(options.consumed_samples or "0", "--consumed-samples")
    return run_of_recipe(recipe, consumed_samples=consumed)


def lock_of_options(
    options: argparse.Namespace,
    *,
    tokens: bool = False,
    sha256: bool = False,
    out: str = "",
    amend: str | None = None,
) -> Lock:
    """Return the lock of a recipe or of a run that flags describe.

    Args:
        options: those of `megaindex.cli.plan.add_run_arguments`.
        tokens: hash every byte of the .bin files too.
        sha256: hash .idx and .bin by SHA-256.
        out: name of the lock, beside which changes of the mix are written that no file holds.
        amend: file of the changes of a framework's run.
    """
    from megaindex.lock.make import make_lock
    from megaindex.progress import copying, counting_samples, silent

    options.skip = skips_of_options(options)
    run: Any = recipe_of(options, besides=("skip",))
    changes = None if run is None else run.mix_changes
    if out and changes is not None and changes.size and not changes.path:  # of a checkpoint
        path = f"{out.removesuffix('.lock')}-mix.npy"
        run = replace(run, mix_changes=changes.write(path, overwrite=options.overwrite))
    named = named_as_in_files(vars(options))
    with named, counting_samples() as progress, copying("reading") as bar:
        made: Lock = make_lock(
            resolve(read_settings(vars(options))) if run is None else run,
            tokens=tokens,
            sha256=sha256,
            cache_dir=options.cache_dir,
            amend=amend,
            progress=progress,
            bar=bar if tokens or sha256 else silent,
        )
    return made


def _evaluation_of(recipe: Recipe, options: argparse.Namespace) -> Run:
    """Return one round of a recipe's evaluation."""
    from megaindex.builders.recipe import open_recipe
    from megaindex.run.from_recipe import evaluation_of_opened

    found = None
    if options.subset == "valid" and recipe.evaluation is not None:
        found = evaluation_of_opened(open_recipe(recipe, cache_dir=options.cache_dir))
    if found is None:
        raise InvalidArgument(
            f"--subset {options.subset}: the recipe reads no such data; leave --subset out"
        )
    return found


def add_index_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `run_of_options` besides those that describe a run."""
    built = parser.add_argument_group("index")
    built.add_argument("--lock", metavar="FILE", help="lock of the run, in place of its settings")
    add_flags(built, "--subset", "--cache-dir")


def _plan_of_lock(options: argparse.Namespace) -> Recipe | RunSettings | Run:
    from megaindex.lock.opening import run_to_plan

    check_lock_alone(options)
    return run_to_plan(options.lock)


def _run_of_lock(options: argparse.Namespace) -> Run:
    from megaindex.lock.opening import run_of_lock

    check_lock_alone(options)
    return run_of_lock(options.lock, subset=options.subset, cache_dir=options.cache_dir)


def check_lock_alone(options: argparse.Namespace) -> None:
    """Raise InvalidArgument if other flags than ``--lock`` describe a run too."""
    skips = [name for name in ("skip_steps", "skip_documents", "skip_file", "remove_skipped")
             if getattr(options, name)]  # fmt: skip
    if others := skips + described_by(options):
        raise InvalidArgument(f"--lock has the whole run, also {flag_of(others[0])}; leave it out")
