"""Feed a target with mutated inputs.

``python tests/robustness/fuzz TARGET [TARGET ...] [--seconds N] [--runs N]``

With atheris installed (requirements/fuzz.txt) coverage guides the mutation; for the native core
that takes the build that run.sh makes. Without it, or with --blind, seeds are mutated at random.
The first input that a target does not survive ends the run, is printed and kept as a file.
"""

from __future__ import annotations

import argparse
import importlib
import os
import random
import resource
import signal
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

Target = Callable[[bytes], None]
TARGETS = {
    "pair": "file_targets",
    "legacy": "file_targets",
    "entry": "file_targets",
    "sidecar": "file_targets",
    "megatron": "text_targets",
    "neox": "text_targets",
    "recipe": "text_targets",
    "nanotron": "text_targets",
    "llm_foundry": "text_targets",
    "maxtext": "text_targets",
    "settings": "text_targets",
    "native": "native_targets",
}
_SECONDS_A_CALL = float(os.environ.get("FUZZ_SECONDS_A_CALL", "3"))
_MEMORY = 6 << 30  # a request for more is a MemoryError, not the end of the machine


def main() -> None:
    options = _options()
    if "asan" not in os.environ.get("LD_PRELOAD", ""):
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    warnings.simplefilter("error")
    signal.signal(signal.SIGVTALRM, _too_long)
    for name in options.targets:
        options.target = name
        if options.blind or importlib.util.find_spec("atheris") is None:
            target, seeds = _load(options.target)
            _blind(target, seeds, options)
        else:
            _guided(options)  # which ends the process


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tests/robustness/fuzz", description=__doc__)
    parser.add_argument("targets", nargs="+", choices=TARGETS, metavar="TARGET")
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--runs", type=int, default=0, help="0: as many as fit into --seconds")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--blind", action="store_true", help="mutate without looking at coverage")
    parser.add_argument("--input", type=Path, help="run this one kept input")
    options = parser.parse_args()
    if len(options.targets) > 1 and not options.blind:
        parser.error("several targets are run with --blind")
    return options


def _load(name: str) -> tuple[Target, list[bytes]]:
    module = importlib.import_module(TARGETS[name])
    target = _limited(getattr(module, name), may_take_long=name == "native")
    return target, getattr(module, f"{name}_seeds")()


def _limited(target: Target, *, may_take_long: bool) -> Target:
    """Processor time of one call is bounded: an input that takes forever is a defect too. A kernel
    may be asked for hours of work, if it stops when it is told to."""

    def run(data: bytes) -> None:
        try:
            signal.setitimer(signal.ITIMER_VIRTUAL, _SECONDS_A_CALL)
            try:
                target(data)
            finally:
                signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        except TimeoutError:
            if not may_take_long:
                raise

    return run


def _too_long(*_: Any) -> None:
    raise TimeoutError(f"took more than {_SECONDS_A_CALL:g} s of processor time")


def _blind(target: Target, seeds: list[bytes], options: argparse.Namespace) -> None:
    rng = random.Random(options.seed)
    end = time.monotonic() + options.seconds
    count = 0
    inputs = [options.input.read_bytes()] if options.input else seeds
    running = Path(f"running-{options.target}").absolute()  # what a hang or a crash leaves behind
    file = os.open(running, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    while count < options.runs or (not options.runs and time.monotonic() < end):
        data = inputs[count] if count < len(inputs) else _mutated(rng, rng.choice(seeds))
        os.pwrite(file, data, 0)
        os.ftruncate(file, len(data))
        try:
            target(data)
        except BaseException:
            kept = Path(f"crash-{options.target}-{count}").absolute()
            kept.write_bytes(data)
            print(f"fuzz {options.target}: input {count} failed, kept as {kept}", file=sys.stderr)
            raise
        count += 1
        if options.input:
            break
    os.close(file)
    running.unlink()
    print(f"fuzz {options.target}: {count} executions, blind, 0 failures")


def _mutated(rng: random.Random, seed: bytes) -> bytes:
    data = bytearray(seed)
    for _ in range(1 + rng.randrange(6)):
        at = rng.randrange(len(data) + 1)
        act = rng.randrange(5)
        if act == 0:
            data[at:at] = rng.randbytes(1 + rng.randrange(8))
        elif act == 1:
            del data[at : at + 1 + rng.randrange(8)]
        elif act == 2:
            data[at : at + 1] = bytes([rng.choice((0, 1, 127, 128, 240, 255))])
        elif act == 3:
            piece = data[at : at + 1 + rng.randrange(16)]
            data[at:at] = piece * (1 + rng.randrange(4))
        elif at < len(data):
            data[at] ^= 1 << rng.randrange(8)
    return bytes(data)


def _guided(options: argparse.Namespace) -> None:
    import atheris

    with atheris.instrument_imports(include=["megaindex"]):
        target, seeds = _load(options.target)
    if options.target == "native":
        importlib.import_module("native_coverage").connect(atheris)
    corpus = Path(f"corpus-{options.target}").absolute()
    corpus.mkdir(exist_ok=True)
    for number, seed in enumerate(seeds):
        (corpus / f"seed-{number}").write_bytes(seed)
    limits = [f"-max_total_time={options.seconds}", f"-runs={options.runs or -1}"]
    flags = ["-max_len=4096", "-timeout=30", "-rss_limit_mb=8192", "-print_final_stats=1"]
    inputs = [str(options.input)] if options.input else [str(corpus)]
    atheris.Setup([sys.argv[0], *limits, *flags, f"-seed={options.seed}", *inputs], target)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
