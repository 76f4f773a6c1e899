"""Compute train_iters, epochs and coverage of a training run, exactly and ahead of time."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from megaindex.cli.options import Parser, add_flags
from megaindex.configs.run_builder import read_settings, resolve
from megaindex.configs.settings import settings_by_name
from megaindex.errors import InvalidArgument

if TYPE_CHECKING:
    from megaindex.audit.balance import BalanceModel
    from megaindex.index.balance import CostModel
    from megaindex.plan.model import Plan
    from megaindex.plan.recipe_plan import RecipePlan
    from megaindex.recipe.recipe import Recipe

DEFAULT_COST_MODEL = "llama3-8b"


def main(arguments: Sequence[str]) -> int:
    """Return 0, or 1 if ``--check`` found repeated or unseen data."""
    options = _parser().parse_args(arguments)
    from megaindex.plan.export import export_settings
    from megaindex.plan.plan import make_plan
    from megaindex.plan.render import print_plan
    from megaindex.progress import counting_samples

    cost = cost_model_of(options)
    recipe = recipe_of(options)
    if recipe is not None:
        return _run_recipe(recipe, options, cost)
    run = resolve(read_settings(vars(options)))
    with counting_samples() as progress:
        plan = make_plan(run, progress=progress)
    balance = None
    if cost is not None:
        from megaindex.audit.balance import model_balance
        from megaindex.audit.streams import stream_of_run

        with counting_samples() as progress:
            balance = model_balance(stream_of_run(run, progress=progress), cost)
    if options.json:
        _print_json(plan, balance)
    elif options.print_config:
        print(export_settings(plan, run, options.print_config))
    else:
        print_plan(plan)
        _print_balance(balance)
    if options.check and plan.check_failures:
        for reason in plan.check_failures:
            print(f"check: {reason}", file=sys.stderr)
        return 1
    return 0


def cost_model_of(options: argparse.Namespace) -> CostModel | None:
    """Return the cost model of --balance and --cost-model, or None if neither is given."""
    text = options.cost_model
    if text is None and options.balance:
        text = DEFAULT_COST_MODEL
    if text is None:
        return None
    from megaindex.index.balance import CostModel

    return CostModel.parse(text, "--cost-model")


def _print_json(plan: Plan | RecipePlan, balance: BalanceModel | None) -> None:
    shown = plan.to_json() | ({} if balance is None else {"balance": balance.to_json()})
    print(json.dumps(shown, indent=2))


def _print_balance(balance: BalanceModel | None) -> None:
    if balance is None:
        return
    from megaindex.audit.render import print_balance

    print()
    print_balance(balance)


def _run_recipe(recipe: Recipe, options: argparse.Namespace, cost: CostModel | None) -> int:
    from megaindex.builders.recipe import plan_recipe
    from megaindex.plan.recipe_plan import make_recipe_plan, print_recipe_plan

    plan = make_recipe_plan(plan_recipe(recipe))
    balance = None
    if cost is not None:
        from megaindex.audit.balance import model_balance
        from megaindex.audit.streams import stream_of_recipe

        balance = model_balance(stream_of_recipe(recipe), cost)
    if options.json:
        _print_json(plan, balance)
    else:
        print_recipe_plan(plan)
        _print_balance(balance)
    repeating = [draw for draw in plan.draws if draw.first_repeat is not None]
    if options.check and repeating:
        for draw in repeating:
            print(f"check: {draw.source} repeats from step {draw.first_repeat} on", file=sys.stderr)
        return 1
    return 0


def recipe_of(options: argparse.Namespace, besides: Sequence[str] = ()) -> Recipe | None:
    """Return the recipe of a file that describes the whole run, or None if there is none.

    Settings named in ``besides`` may be given with it.
    """
    given = [name for name in _RECIPE_FILES if getattr(options, name)]
    if not given:
        return None
    recipe = _read_recipe(given[0], options)
    if recipe is None and len(given) == 1:  # of MaxText, in the order of Megatron-LM
        return None
    besides = [*besides, *_RECIPE_FILES[given[0]]]
    said = vars(settings_by_name(vars(options))) | {
        name: getattr(options, name) for name in ("neox_config", "megatron_args")
    }
    others = [
        f"--{name.replace('_', '-')}"
        for name, value in said.items()
        if value and name not in besides
    ]
    if len(given) > 1 or others:
        one, other = [*(f"--{n.replace('_', '-')}" for n in given), *others][:2]
        raise InvalidArgument(f"{one} describes the whole run, so does {other}; give one of them")
    return recipe


# files that describe a whole run, and the settings that may be given with each
_RECIPE_FILES: dict[str, tuple[str, ...]] = {
    "recipe": (),
    "nanotron_config": (),
    "llm_foundry_config": ("world_size",),
    "maxtext_config": ("world_size",),
}


def _read_recipe(name: str, options: argparse.Namespace) -> Recipe | None:
    file, devices = getattr(options, name), options.world_size
    if name == "recipe":
        from megaindex.recipe.recipe_file import read_recipe

        return read_recipe(file)
    if name == "nanotron_config":
        from megaindex.recipe.nanotron_yaml import read_nanotron

        return read_nanotron(file)
    if name == "llm_foundry_config":
        from megaindex.recipe.llm_foundry_yaml import read_llm_foundry

        return read_llm_foundry(file, devices=devices)
    from megaindex.recipe.maxtext_yaml import read_maxtext

    return read_maxtext(file, devices)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="megaindex plan", description=__doc__, allow_abbrev=False)
    add_run_arguments(parser)
    add_balance_arguments(parser)
    group = parser.add_argument_group("output")
    add = group.add_argument
    add("--coverage", metavar="HOW", help="auto (default), exact, expected or none")
    add("--blend-counts", metavar="HOW", help="auto (default), exact or bounds")
    add_flags(group, "--json")
    add("--print-config", metavar="F", help="print settings of neox or megatron")
    add("--check", action="store_true", help="exit 1 on repeated or unseen data")
    return parser


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that describe a run, shared by plan and audit."""
    _add_data(parser.add_argument_group("data"))
    _add_batch(parser.add_argument_group("batch size"))
    _add_target(parser.add_argument_group("target (exactly one)"))
    _add_rest(parser.add_argument_group("order, evaluation and framework settings"))


def add_balance_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that model the work of rows, shared by plan and audit."""
    add = parser.add_argument_group("balance").add_argument
    add("--balance", action="store_true", help="model the work of rows, and the time ranks wait")
    add(
        "--cost-model",
        metavar="M",
        help=f"llama3-8b, llama3-70b, mixtral-8x7b or LINEAR:ATTENTION; default of --balance: "
        f"{DEFAULT_COST_MODEL}",
    )


def _add_data(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add_flags(group, "--recipe")
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
    add_flags(group, "--split", "--seq-length")


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
    add("--phase-transition-iterations", nargs="+", type=int, metavar="N", help=megatron)
    add("--separate-final-epoch", metavar="HOW", help="shuffle it apart: auto, always or never")
    add("--final-epoch-threshold", type=float, metavar="X", help="default: 0.8")
    add("--train-data-exact-num-epochs", type=int, metavar="E", help="epochs of the index")
    add("--epochs-mixed", type=int, metavar="K", help="order epoch: epochs shuffled together")
    add("--left-over", metavar="HOW", help="order epoch: drop (default) or carry")
    add_flags(group, "--max-documents", "--long-documents")
