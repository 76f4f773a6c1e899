"""The training command that a launch script starts, found by running it with recorders.

The launchers (`LAUNCHERS`) are replaced on the PATH by a program that writes its words and its
environment to a folder and succeeds without output. Of srun, sbatch and mpirun it runs the shell
script that they would start, so that the launchers in it are recorded too. Nothing else is changed:
all other commands of the script run. A captured command is a JSON file, read like a script.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaindex.errors import InvalidArgument
from megaindex.io.atomic import Damaged, parse_object
from megaindex.validation import shown

CAPTURE = "`megaindex capture -- bash SCRIPT …` runs the script and writes what it starts"
"""Remedy for a script that is not evaluated to the end."""

LAUNCHERS = (
    "torchrun", "python", "python3", "srun", "sbatch", "mpirun", "mpiexec", "deepspeed",
    "accelerate", "torchx", "ray", "horovodrun",
    *(f"python3.{minor}" for minor in range(8, 15)),
)  # fmt: skip
_KEY, _VERSION = "megaindex_capture", 1
_MOST_CALLS, _MOST_BYTES = 1000, 1 << 24  # recorded calls, and bytes of each
_COUNTING = ("WORLD_SIZE", "NNODES", "NUM_NODES", "NODE_RANK", "RANK", "LOCAL_RANK")
_PREFIXES = ("SLURM_", "MASTER_", "OMPI_", "CUDA_VISIBLE_DEVICES", "PET_")
_RECORDER = """
import json, os, sys
folder, name, words = sys.argv[1], sys.argv[2], sys.argv[3:]
for number in range({most}):
    try:
        descriptor = os.open(f"{{folder}}/{{number:04}}", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    except FileExistsError:
        continue
    with open(descriptor, "w") as file:
        call = {{"words": [name, *words], "environment": dict(os.environ), "folder": os.getcwd()}}
        json.dump(call, file)
    break
else:
    sys.exit("megaindex capture: more than {most} calls of launchers")
if name in ("srun", "mpirun", "mpiexec", "sbatch"):
    for place, word in enumerate(words):
        if os.path.basename(word) in ("bash", "sh"):
            os.execvp(word, words[place:])
        if word.endswith((".sh", ".sbatch", ".slurm")) and os.path.isfile(word):
            os.execvp("bash", ["bash", *words[place:]])
    if name == "sbatch" and "--wrap" not in " ".join(words):
        os.execvp("bash", ["bash", "-s"])
"""


@dataclass
class Call:
    """A launcher that the script started: its words, environment and folder."""

    words: list[str]
    environment: Mapping[str, str]
    folder: str

    @property
    def counting(self) -> dict[str, str]:
        """The environment that decides about ranks and devices."""
        items = sorted(self.environment.items())
        return {k: v for k, v in items if k in _COUNTING or k.startswith(_PREFIXES)}


def run_recorded(command: Sequence[str], timeout: float) -> tuple[list[Call], int]:
    """Run a command with recorders in place of the launchers; return their calls and its status.

    Its output goes to standard error, it has no input, and after ``timeout`` seconds it is killed
    with all processes of its group.

    Raises:
        InvalidArgument: the program cannot be started, or runs too long.
    """
    with tempfile.TemporaryDirectory(prefix="megaindex-capture-") as folder:
        calls, programs, recorder = (Path(folder, name) for name in ("calls", "bin", "record.py"))
        calls.mkdir()
        programs.mkdir()
        recorder.write_text(_RECORDER.format(most=_MOST_CALLS))
        for name in LAUNCHERS:
            words = [sys.executable, "-I", "-S", str(recorder), str(calls), name]
            (programs / name).write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
            (programs / name).chmod(0o700)
        environment = dict(os.environ, PATH=f"{programs}:{os.environ.get('PATH', os.defpath)}")
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=2, env=environment, start_new_session=True
            )
        except OSError as error:
            raise InvalidArgument(
                f"{shown(command[0])} cannot be started: {error.strerror}; give "
                "the script's own command line after --, such as bash launch.sh"
            ) from None
        try:
            status = _waited(process, time.monotonic() + timeout)
        finally:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if status is None:
            raise InvalidArgument(
                f"{shlex.join(command)[:80]} ran longer than {timeout:g} s and "
                "was killed; give more with --timeout"
            )
        return [_read_call(path) for path in sorted(calls.iterdir())], status


def _waited(process: subprocess.Popen[bytes], until: float) -> int | None:
    """Return the status of a process once its whole group has ended; None after ``until``."""
    try:
        status = process.wait(max(until - time.monotonic(), 0))
    except subprocess.TimeoutExpired:
        return None
    grace = min(until, time.monotonic() + 5)  # for launchers in the background
    with suppress(ProcessLookupError, PermissionError):
        while time.monotonic() < grace:
            os.killpg(process.pid, 0)
            time.sleep(0.02)
    return status


def _read_call(path: Path) -> Call:
    if path.stat().st_size > _MOST_BYTES:
        raise InvalidArgument(f"a command of more than {_MOST_BYTES} bytes")
    call = json.loads(path.read_text() or "{}")
    if not call:
        raise InvalidArgument("a launcher was killed while it was recorded")
    return Call(call["words"], call["environment"], call["folder"])


def written(call: Call, command: Sequence[str], status: int) -> str:
    """Return the file of a captured command."""
    content = {
        _KEY: _VERSION, "words": call.words, "environment": call.counting, "folder": call.folder,
        "command": list(command), "status": status,
    }  # fmt: skip
    return json.dumps(content, indent=1) + "\n"


def is_capture(text: str) -> bool:
    return text.lstrip()[:1] == "{" and f'"{_KEY}"' in text[:200]


def read_capture(text: str, path: str) -> tuple[list[str], Mapping[str, Any], tuple[str, ...]]:
    """Return words, environment and notes of a captured command.

    Raises:
        InvalidArgument: it has another form, or another version.
    """
    try:
        content = parse_object(text)
    except Damaged as error:
        raise InvalidArgument(
            f"--megatron-args: {shown(path)}: {error}; write it again with megaindex capture"
        ) from None
    words, environment, folder = (content.get(k) for k in ("words", "environment", "folder"))
    texts = isinstance(words, list) and all(isinstance(word, str) for word in words)
    if content.get(_KEY) != _VERSION or not texts or not isinstance(environment, dict):
        raise InvalidArgument(
            f"--megatron-args: {shown(path)} is no captured command of version {_VERSION}; write "
            "it again with megaindex capture"
        )
    assert isinstance(words, list)
    notes: tuple[str, ...] = ()
    if folder != os.getcwd():
        notes = (f"the command was captured in {shown(folder)}, to which its paths are relative",)
    return words, environment, notes
