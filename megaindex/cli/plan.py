"""``megaindex plan``: arguments in, table or JSON out."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from megaindex.cli.options import Parser, add_flags
from megaindex.configs.run_builder import resolve
from megaindex.configs.settings import Settings, merged
from megaindex.errors import InvalidArgument

if TYPE_CHECKING:
    from megaindex.recipe.recipe import Recipe


def main(arguments: Sequence[str]) -> int:
    """0 for a plan, 1 where ``--check`` found repeated or unseen data."""
    options = _parser().parse_args(arguments)
    from megaindex.plan.export import export_settings
    from megaindex.plan.plan import make_plan
    from megaindex.plan.render import print_plan
    from megaindex.progress import counting_samples

    recipe = recipe_of(options)
    if recipe is not None:
        return _run_recipe(recipe, options)
    run = resolve(settings_of(options))
    with counting_samples() as progress:
        plan = make_plan(run, progress=progress)
    if options.json:
        print(json.dumps(plan.to_json(), indent=2))
    elif options.print_config:
        print(export_settings(plan, run, options.print_config))
    else:
        print_plan(plan)
    if options.check and plan.check_failures:
        for reason in plan.check_failures:
            print(f"check: {reason}", file=sys.stderr)
        return 1
    return 0


def _run_recipe(recipe: Recipe, options: argparse.Namespace) -> int:
    from megaindex.builders.recipe import plan_recipe
    from megaindex.plan.recipe_plan import make_recipe_plan, print_recipe_plan

    plan = make_recipe_plan(plan_recipe(recipe))
    if options.json:
        print(json.dumps(plan.to_json(), indent=2))
    else:
        print_recipe_plan(plan)
    repeating = [draw for draw in plan.draws if draw.first_repeat is not None]
    if options.check and repeating:
        for draw in repeating:
            print(f"check: {draw.source} repeats from step {draw.first_repeat} on", file=sys.stderr)
        return 1
    return 0


def recipe_of(options: argparse.Namespace, besides: Sequence[str] = ()) -> Recipe | None:
    """The recipe that --recipe or --nanotron-config names, if one of them is given.

    Settings named in ``besides`` may be given with it.
    """
    given = [name for name in ("recipe", "nanotron_config") if getattr(options, name)]
    if not given:
        return None
    said = vars(settings_of_flags(options)) | {
        name: getattr(options, name) for name in ("neox_config", "megatron_args")
    }
    others = [
        f"--{name.replace('_', '-')}"
        for name, value in said.items()
        if value and name not in besides
    ]
    if len(given) > 1 or others:
        one, other = [*(f"--{n.replace('_', '-')}" for n in given), *others][:2]
        raise InvalidArgument(f"{one} describes the whole run, {other} too; give one of them")
    if given == ["recipe"]:
        from megaindex.recipe.recipe_file import read_recipe

        return read_recipe(options.recipe)
    from megaindex.recipe.nanotron_yaml import read_nanotron

    return read_nanotron(options.nanotron_config)


def settings_of(options: argparse.Namespace) -> Settings:
    """The flags of `add_run_arguments` laid over the framework's own settings."""
    if options.neox_config and options.megatron_args:
        raise InvalidArgument("--neox-config and --megatron-args exclude each other; give one")
    base = Settings()
    if options.neox_config:
        from megaindex.configs.neox_yaml import read_neox

        base = read_neox(options.neox_config)
    elif options.megatron_args:
        from megaindex.configs.megatron_args import read_megatron

        over = settings_of_flags(options)
        base = read_megatron(options.megatron_args, script_args=script_args(options), over=over)
    elif options.script_args:
        raise InvalidArgument("--script-args are those of a script: give --megatron-args too")
    return merged(base, settings_of_flags(options))


def script_args(options: argparse.Namespace) -> Sequence[str]:
    """Positional parameters of the launch script, given as words or as one quoted text."""
    words: list[str] = options.script_args or []
    return shlex.split(words[0]) if len(words) == 1 else words


def settings_of_flags(options: argparse.Namespace) -> Settings:
    """Return the settings that the flags themselves give."""
    said = {
        f.name: getattr(options, f.name, None)
        for f in fields(Settings)
        if f.name not in ("notes", "ignored")
    }
    flags: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in said.items()}
    return Settings(**flags)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="megaindex plan",
        description="train_iters, epochs and coverage of a training run, exactly and ahead of time",
        allow_abbrev=False,
    )
    add_run_arguments(parser)
    _add_output(parser.add_argument_group("output"))
    return parser


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags that describe a run, which other verbs share."""
    _add_data(parser.add_argument_group("data"))
    _add_batch(parser.add_argument_group("batch size"))
    _add_target(parser.add_argument_group("target (exactly one)"))
    _add_rest(parser.add_argument_group("how it is built and served"))


def _add_data(group: argparse._ArgumentGroup) -> None:
    add_flags(group, "--recipe")
    group.add_argument("--nanotron-config", metavar="FILE", help="Nanotron's, with data_stages")
    group.add_argument("--neox-config", nargs="+", metavar="FILE", help="NeoX files, merged")
    group.add_argument("--megatron-args", metavar="ARGS", help="arguments, or a shell script")
    group.add_argument("--script-args", nargs="+", metavar="W", help="the script's $1, $2, …")
    group.add_argument("--framework-version", metavar="V", help="of Megatron-LM: 0.16.1, main")
    blend = "P, P P … or w P w P …: prefixes of .bin and .idx, or URLs (s3://, gs://, az://)"
    add_flags(group, "--data-path", help=blend)
    group.add_argument("--train-data-path", nargs="+", metavar="P", help="train data of its own")
    group.add_argument("--valid-data-path", nargs="+", metavar="P")
    group.add_argument("--test-data-path", nargs="+", metavar="P")
    group.add_argument("--tokens-per-epoch", nargs="+", metavar="T", help="plan without files")
    group.add_argument("--weights", nargs="+", metavar="w", help="one for each source")
    add_flags(group, "--split", "--seq-length")


def _add_batch(group: argparse._ArgumentGroup) -> None:
    for flag, meaning in (
        ("--micro-batch-size", "samples of one forward pass"),
        ("--data-parallel-size", "model replicas"),
        ("--gradient-accumulation-steps", "default 1"),
        ("--global-batch-size", "samples of one iteration"),
        ("--world-size", "GPUs, in place of the data-parallel size"),
        ("--tensor-model-parallel-size", "default 1"),
        ("--pipeline-model-parallel-size", "default 1"),
        ("--context-parallel-size", "default 1"),
    ):
        group.add_argument(flag, type=int, metavar="N", help=meaning)
    group.add_argument(
        "--batch-schedule", metavar="'0:768 250B:1536'", help="batch size from so many tokens on"
    )
    group.add_argument(
        "--rampup-batch-size", nargs=3, type=int, metavar=("START", "INC", "SAMPLES")
    )


def _add_target(group: argparse._ArgumentGroup) -> None:
    add_flags(group, "--epochs", help="such as 1, 1.5 or 3/2; E,E,… one per source")
    group.add_argument("--train-iters", type=int, metavar="I")
    group.add_argument("--train-samples", metavar="N")
    group.add_argument("--train-tokens", metavar="N", help="such as 300B")


def _add_rest(group: argparse._ArgumentGroup) -> None:
    add_flags(group, "--order", "--variance-buffer", "--seed")
    group.add_argument(
        "--mid-level-dataset-surplus", metavar="X", help="Megatron-LM: its buffer - 1"
    )
    group.add_argument("--tail", help="of the last batch: drop (default), pad or wrap")
    group.add_argument("--eval-interval", type=int, metavar="N", help="default 1000")
    group.add_argument("--eval-iters", type=int, metavar="N", help="default 100")
    group.add_argument("--eval-global-batch-size", type=int, metavar="N")
    group.add_argument("--eval-micro-batch-size", type=int, metavar="N")
    group.add_argument("--start-eval-at-iter", type=int, metavar="N")
    for flag, meaning in (
        ("--skip-train", "Megatron-LM: evaluate once, train nothing"),
        ("--full-validation", "Megatron-LM: evaluate on the whole validation data"),
        ("--multiple-validation-sets", "Megatron-LM: evaluate on each source by itself"),
    ):
        group.add_argument(flag, action="store_true", default=None, help=meaning)
    group.add_argument("--dataloader-type", metavar="HOW", help="Megatron-LM: single or cyclic")
    group.add_argument("--consumed-samples", metavar="N", help="of a run already under way")
    group.add_argument("--phase-transition-iterations", nargs="+", type=int, metavar="N")
    group.add_argument("--separate-final-epoch", metavar="HOW", help="auto, always or never")
    group.add_argument("--final-epoch-threshold", type=float, metavar="X", help="default 0.8")
    group.add_argument("--train-data-exact-num-epochs", type=int, metavar="E")
    group.add_argument("--epochs-mixed", type=int, metavar="K", help="order epoch: shuffled as one")
    group.add_argument("--left-over", metavar="HOW", help="order epoch: drop (default) or carry")


def _add_output(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--coverage", metavar="HOW", help="exact, expected, none; default auto")
    group.add_argument("--blend-counts", metavar="HOW", help="exact, bounds; default auto")
    add_flags(group, "--json")
    group.add_argument("--print-config", metavar="F", help="settings to paste: neox or megatron")
    group.add_argument("--check", action="store_true", help="exit 1 on repeated or unseen data")
