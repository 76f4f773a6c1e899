"""Run a launch script with the launchers replaced, and write the training command that it starts.

torchrun, python, srun, deepspeed, accelerate, mpirun and the like are replaced on the PATH by a
recorder that succeeds without output, so none of them is started. Everything else in the script
runs: it can write files and delete them. `plan --megatron-args FILE` and every other verb that
takes --megatron-args read what is written."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence

from megaindex.cli.options import Parser, add_flags, check_output, print_json
from megaindex.errors import InvalidArgument, visible


def main(arguments: Sequence[str]) -> int:
    words = list(arguments)
    own, command = words, []
    if "--" in words:
        own, command = words[: words.index("--")], words[words.index("--") + 1 :]
    options = _parser().parse_args(own)
    if not command:
        raise InvalidArgument("give the script after --, as megaindex capture -- bash launch.sh")
    check_output("--out", options.out, ".json", overwrite=options.overwrite)
    from megaindex.io.atomic import write_file
    from megaindex.settings.capture import run_recorded, written
    from megaindex.settings.megatron_args import trains

    print(
        f"megaindex capture: runs {_line(command)}, with its launchers replaced",
        file=sys.stderr,
    )
    calls, status = run_recorded(command, options.timeout)
    training = [call for call in calls if trains(call.words)]
    others = [call for call in calls if not trains(call.words)]
    for call in others:
        print(
            f"recorded, not started, empty output: {_line(call.words)[:200]}",
            file=sys.stderr,
        )
    print(f"the script ended with status {status}", file=sys.stderr)
    if not training:
        raise InvalidArgument(
            f"{len(calls)} launchers were recorded, none with an argument of Megatron-LM: a "
            "launcher that is named by its path (/usr/bin/python3), an alias or a container is not "
            "seen; name it without a path, or give the arguments as a string"
        )
    number = options.command or 1
    if (len(training) > 1 and not options.command) or number > len(training):
        for place, call in enumerate(training, 1):
            print(f"{place}: {_line(call.words)}", file=sys.stderr)
        raise InvalidArgument(
            f"the script starts {len(training)} training commands; choose one with --command N"
        )
    call = training[number - 1]
    text = written(call, command, status).encode()
    write_file(options.out, lambda file: file.write(text), overwrite=options.overwrite)
    if options.json:
        print_json(
            {"file": options.out, "words": call.words, "environment": call.counting,
             "folder": call.folder, "status": status, "others": [one.words for one in others]}
        )  # fmt: skip
    else:
        for name, value in call.counting.items():
            print(f"{name}={_line([value])}")
        print(f"{_line(call.words)}\n\nwrote {options.out}: megaindex plan "
              f"{shlex.quote(options.out)}")  # fmt: skip
    return 0


def _line(words: Sequence[str]) -> str:
    """Return words as a command line, with control characters escaped."""
    return visible(shlex.join(words))


def _parser() -> argparse.ArgumentParser:
    usage = "megaindex capture [options] -- bash launch.sh [ARGS]"
    parser = Parser(prog="megaindex capture", description=__doc__, usage=usage, allow_abbrev=False)
    add = parser.add_argument
    add("--out", default="captured.json", metavar="FILE", help="default: captured.json")
    add("--command", type=int, metavar="N", help="of several training commands the Nth, from 1")
    add("--timeout", type=int, default=60, metavar="S", help="seconds; default: 60")
    add_flags(parser, "--overwrite", "--json")
    return parser
