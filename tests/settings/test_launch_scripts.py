"""Launch scripts as Bash runs them, under `megaindex capture`, and as the reader reads them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.inputs import for_each

from megaindex.cli import main
from megaindex.errors import InvalidArgument
from megaindex.settings.capture import Call, _read_call, read_capture
from megaindex.settings.megatron_args import read_megatron
from megaindex.settings.run_words import kind_of_file
from megaindex.settings.settings import Settings
from megaindex.settings.shell import Script

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")

READ = [  # equal to Bash, not refused
    "SEED=$((-3 + 12)); X=$((- -2)); ARGS+=(--num-workers $X)",
    "SEED=7",
    'A=("" x); SEED=${A}7',
    "SEED=${UNSET_HERE:-7}",
    "export SEED=7 OTHER=8",
    "DTYPE=7 OPTIONS=8 HOSTFILE=9 EPOCHS=1; SEED=$DTYPE$OPTIONS$HOSTFILE$EPOCHS",
    'SEED="${UNSET_HERE:-"7"}"',
    '[ -f "$SEED.idx" ] || mkdir -p /tmp/$SEED',
    'if [ ! -d / ]; then echo "no $SEED"; exit 1; fi',
    "shift; SEED=$1",
    ': "${1:?give a seed}"; SEED=${2:?}',
    'printf "%s\\n" "$SEED"; SEED=3',
    "X=checkpoints/seed.7.txt; X=${X%.*}; SEED=${X##*.}",
    "SEED=1; eval 'SEED=6'",
    "SEED=3; exec > >(cat) 2>&1",
    'ARGS+=(--seed 9 "--split 9,1,0")\nSEED=5',
    "X=3; SEED=$((X * 2 + 1))",
    "X=17; SEED=$(( X / 5 + 8 % 3 + 20 ))",
    "A=922337203685477580; SEED=$((A * 10 + 7 - A * 10))",
    'if [ -z "$UNSET_HERE" ]; then SEED=4; else SEED=5; fi',
    "SEED=3; if [ 1 = 2 ]; then if ls /no >/dev/null; then SEED=9; fi; fi",
    "SEED=3 # a comment that ends in a backslash \\\nSEED=4",
    "SEED=3\necho x | SEED=4\n(SEED=5)\nSEED=6 true",
    "set -euo pipefail\nSEED=2; [[ $SEED == 2 && -n $SEED ]] || exit 1",
    "set -euo pipefail; if [ 1 = 2 ]; then SEED=9; fi; SEED=${NOPE:-8}",
    "set -e; if [ 1 = 2 ]; then SEED=4; elif [ 2 = 3 ]; then SEED=5; else SEED=6; fi",
    "set -e; [ 1 = 1 ] && ! true; ! true; SEED=4",
    "SEED=3; [ 1 = 2 ] && true || SEED=5",
    "SEED=3; if [ ! 1 -eq 2 ]; then SEED=4; fi; if [ ! a = a ]; then SEED=5; fi",
    "SEED=3; ([ 1 = 2 ]) && SEED=4; ([ 1 = 2 ]) || SEED=5",
    "if command -v no-such-program >/dev/null; then OTHER=5; fi\nSEED=3",
    "[ -f /no/such/file ] || echo missing\nSEED=3",
    "cat > /dev/null <<END\nSEED=9 $(nothing)\nEND\nSEED=3",
    "SEED=3; unset OTHER; trap 'echo bye' EXIT",
    'echo "SEED=9" ; SEED=3; OUT="run-$(date +%s)"; mkdir -p "/tmp" || exit 1',
    "X=0; SEED=$((X + 3)); PORT=$((RANDOM % 1000 + 20000)); ARGS+=(--master_port $PORT)",
    'SEED=7; X=${NOPE:-""}; ARGS+=(--seed $SEED$X)',
    "printf '=%.0s' {1..100}; SEED=4",
    "set -e; SEED=5; bash -c 'false; SEED=6'",
    "source ./settings.sh",
    '. "$(dirname "$0")/settings.sh"',
    'ARGS+=(--data-path `pwd`/web)\ncd /; echo "PWD=$PWD" # PWD=x',
    "PWD=$(pwd); ARGS+=(--data-path $( pwd )/web)",
    'D="$(pwd)"; (cd /); ARGS+=(--data-path "$D/web" --save `pwd`)',
    'HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"; source "$HERE/settings.sh"',
]
UNKNOWN = [  # equal to Bash, or refused with the construct and its line
    "cd /; ARGS+=(--data-path $(pwd)/web)",
    "PWD=/; ARGS+=(--data-path $(pwd)/web)",
    "PWD=(/ x); ARGS+=(--data-path $(pwd)/web)",
    "ARGS+=(--data-path $(p wd)/web)",
    "unset PWD; ARGS+=(--data-path `pwd`/web)",
    'X="SEED=5"; [ -f /no ] || [[ $X -eq 5 ]]',
    'X="SEED=5"; [[ $X -eq 5 ]]',
    "X=$(echo SEED=9); Y=$((X))",
    'Y="9*"; SEED=9; [[ 98 == $Y ]] && SEED=98',
    "while [[ $# -gt 0 ]]; do case $1 in --seed) S=$2; shift 2 ;; esac; done; SEED=4",
    "X=17; SEED=$(( -X / 5 + 8 % 3 + 20 ))",
    "A=922337203685477580; SEED=$(((A * 10 + 8) / A + 19))",
    "printf %d x || SEED=98",
    "I=SEED=9; A[$I]=5",
    "I=SEED=9; B=(1); [ -d / ] && B[I]=5",
    'I=SEED; [ -d / ] && printf "-v$I" 9',
    'I=\'B[SEED=9]\'; [ -v "$I" ]; test -v "$I"',
    "declare -r SEED=7; SEED=8",
    "F=g; g() { SEED=9; }; $F",
    "while [[ $# -gt 0 ]]; do SEED=$2; shift 2; done",
    "A=7; AB=9; SEED=$A\\\nB",
    "read_me() { SEED=8; }\nread_me",
    "for S in 1 2 3; do SEED=$S; done",
    "f() { SEED=$1; ARGS+=(--split 9,1,0); }\nf 6",
    "for S in 1 2 3; do [ $S = 2 ] && break; SEED=$S; done",
    "for S in 1 2 3; do if [ $S -eq 2 ]; then continue; fi; SEED=$S; done",
    "case big-7b in small*) SEED=1 ;; *-7b|x) SEED=2 ;; *) SEED=3 ;; esac",
    "f() { SEED=$1; return 1; SEED=9; }\nf 6 || EXTRA=1",
    'f() { if [ "$1" = a ]; then SEED=2; return; fi; SEED=3; }\nf a',
    "while [[ $# -gt 0 ]]; do case $1 in --seed) SEED=$2; shift 2 ;; *) shift ;; esac; done",
    "eval 'SEED=6'",
    "A=(1 2 3); SEED=${A[1]}${#A[@]}",
    "N=2; ((N > 1)) && SEED=9",
    "[ -f /no/such/file ] && SEED=9",
    "[ -d / ] && SEED=9 || SEED=8",
    "if grep -q nothing /dev/null; then SEED=9; fi",
    "if command -v bash; then SEED=9; fi",
    "case $(hostname) in x) SEED=8 ;; *) SEED=9 ;; esac",
    "for S in 1 2 3; do [ -f /no/file ] && break; SEED=$S; done",
    "for S in 1 2 3; do [ -d / ] && continue; SEED=$S; done",
    "f() { [ -d / ] && return 0; SEED=9; }\nf",
    "f() { return 3; }\nf && SEED=9",
    "let SEED=9",
    "((SEED = 9))",
    "((SEED++))",
    "X=$((SEED = 9))",
    "printf -v SEED %s 9",
    "read SEED <<< 9",
    "while read -r S; do SEED=$S; done <<< 9",
    "f() { local SEED=9; }\nf",
    "f() { local -n R=$1; R=9; }\nf SEED",
    "declare -i SEED; SEED=4+5",
    "SEED=(1 2); SEED[1]=9; SEED=${SEED[1]}",
    "SEED=$(echo 9)",
    "SEED=`echo 9`",
    'eval "$(echo SEED=9)"',
    "source <(echo SEED=9)",
    "source /no/such/file; UNUSED=1",
    "for S in {1..9}; do SEED=$S; done",
    "for ((i = 0; i < 9; i++)); do SEED=$i; done",
    "until [ $SEED -gt 8 ]; do SEED=$((SEED + 1)); [ -f /x ] && break; done",
    "mapfile -t L <<< 9; SEED=${L[0]}",
    "set -- -s 9; while getopts s: o; do SEED=$OPTARG; done",
    "X=SEED; SEED=${!X}",
    "X=9,1; SEED=${X%,*}",
    "X=abc; SEED=${#X}; SEED=${X:0:1}7; SEED=9",
    "declare -A M=([a]=9); SEED=${M[a]}",
    "M=(1 2); IFS=,; SEED=9",
    "shopt -s extglob\ncase 9 in +([0-9])) SEED=9 ;; esac",
    "set -- --seed 9; SEED=${2}; SEED=$RANDOM; SEED=9",
    "select S in a; do SEED=9; done < /dev/null",
    "SEED=9 &\nwait",
    "SEED=9; unset $(echo SEED); SEED=${SEED:-4}",
    "export $(echo SEED=9)",
    "$(echo export) SEED=9",
    "false || { SEED=9; true; } && SEED=8",
    "if ! [ -e /no ] ; then unset SEED; SEED=9; fi",
    "trap 'SEED=9' DEBUG; true",
    "command eval SEED=9; builtin export SEED=8",
    "f() { SEED=9; }; [ -d / ] && f",
    "set -e; (exit 3) || SEED=9",
    "[ 0 -eq $(false; echo $?) ] || ARGS=(--seq-length 32)",
    "SEED=9 eval 'ARGS+=(--split $SEED,1,0)'",
    "SEED=9 source ./settings.sh",
    "true <<E SEED=9\nE",
    'set -e; [ -n "$NOPE" ] && SEED=9',
    "set -e; ! true || SEED=9; set +e; false",
    "true {SEED}>/dev/null",
    "X='+(a)'; [[ aa == $X ]] && SEED=9",
    "X='@(a|b)'; if [[ a == $X ]]; then SEED=9; fi",
    "trap 'SEED=9' debug; true",
    "cat > /dev/null <<E\n\tE\nSEED=9\nE",
    "cat > /dev/null <<E\nx \\\nE\nSEED=9\nE",
    'X=; X+=(9); SEED="${#X[@]}"',
    "if [ ! = x ]; then SEED=9; fi",
    'if [ ! "" ]; then SEED=9; fi',
    "if [ ! -eq 5 ]; then SEED=9; fi",
    "if [ -n = ]; then SEED=9; fi",
    "if [ -d = ]; then SEED=9; fi",
    "Y='$((SEED = 9))'; X=\"${Y@P}\"",
    "touch 9; X=9; SEED=$(echo [$X]); X=[$X]",
    "touch 9; X=9; ARGS+=(--split [$X],1,0)",
    "time -p SEED=9",
    "UID=5; SEED=9",
    "time { SEED=9; }",
    "set -e; { [ 1 = 2 ] && SEED=9; }",
    "set -e; { false; } || SEED=9",
    "set -u; [[ 1 == 2 && $NOPE ]]",
    "set -u; [[ 1 == 2 && $NOPE ]] || SEED=9",
    "X=$((1 / 0)); SEED=9",
    "X=$((1 + )); SEED=9",
    ": ${X:=9}; SEED=$X",
    "true ${NOPE=9}; SEED=$NOPE",
    "X=${X?} true ${X:=9}; SEED=8",
]
SCRIPT = """#!/bin/bash
#SBATCH --nodes=2
SEED=1
ARGS=(--seq-length 16 --global-batch-size 4 --data-path web)
{body}
torchrun --nproc_per_node 4 pretrain_gpt.py "${{ARGS[@]}}" --train-iters 9 --seed $SEED
"""


def as_bash_runs_it(folder: Path, *words: str) -> Settings:
    assert main(["capture", "--overwrite", "--", "bash", "launch.sh", *words]) == 0
    return read_megatron("captured.json", {})


@pytest.mark.parametrize(
    "body",
    [
        "set -e; [ 1 = 2 ]",
        "set -e; if [ 1 = 1 ]; then [ 1 = 2 ]; fi",
        "set -e\nfalse",
        "set -o errexit; true && false",
        "set -e; (false)",
        "set -e; true | false",
        "set -eo pipefail; false | true",
        "set -u; A=$NOPE",
        "set -eu; echo ${#NOPE}",
        "set -u; A=$((NOPE + 1))",
        "if true; then fi",
        "exit 0",
    ],
)
def test_nothing_is_started_behind_the_end_of_a_script(tmp_path: Path, body: str) -> None:
    text = f"{body}\ntorchrun train.py\n"
    marks = "torchrun() { echo started; }\n"
    done = subprocess.run(
        ["bash", "-c", marks + text], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert "started" not in done.stdout
    if re.match(r"set -e(o pipefail)?\W|set -o errexit|if|set -u; A=\$\(", body):
        with pytest.raises(InvalidArgument, match="is not evaluated"):
            Script(text, {})
        return
    made = Script(text, {})
    assert not [one for one in made.commands if one.words[0] == "torchrun"]
    assert made.exits_at


def write_scripts(folder: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    """Writes launch.sh with these commands, and what it may source, in the working directory."""
    monkeypatch.chdir(folder)
    (folder / "settings.sh").write_text("SEED=12\n")
    (folder / "launch.sh").write_text(SCRIPT.format(body=body))


@for_each("body", READ + UNKNOWN)
def test_the_reader_is_equal_to_bash_or_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str
) -> None:
    write_scripts(tmp_path, monkeypatch, body)
    try:
        found = read_megatron("launch.sh", script_args=["--seed", "21"])
    except InvalidArgument as error:
        refused = str(error)
        assert body in UNKNOWN, refused
        assert "line " in refused
        assert "megaindex capture" in refused
    else:
        expected = as_bash_runs_it(tmp_path, "--seed", "21")
        assert replace(found, notes=()) == replace(expected, notes=())


@pytest.mark.slow
@for_each("body", UNKNOWN)
def test_bash_runs_what_the_reader_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str
) -> None:
    write_scripts(tmp_path, monkeypatch, body)
    assert as_bash_runs_it(tmp_path, "--seed", "21").seq_length in (16, 32)


def test_a_guard_is_said_and_a_choice_of_commands_is_refused(tmp_path: Path) -> None:
    script = tmp_path / "launch.sh"
    script.write_text(SCRIPT.format(body="[ -f pretrain_gpt.py ] || exit 1"))
    assert any("goes on at line 5" in note for note in read_megatron(str(script), {}).notes)
    choice = "if [ -f x ]; then torchrun pretrain_gpt.py --seq-length 8; exit; fi"
    script.write_text(SCRIPT.format(body=choice))
    with pytest.raises(
        InvalidArgument, match=r"line 5: .if .*torchrun pretrain.* is not evaluated"
    ):
        read_megatron(str(script), {})


def test_a_computed_value_of_another_argument_is_read(tmp_path: Path) -> None:
    script = tmp_path / "launch.sh"
    addr = "ADDR=$(scontrol show hostnames | head -n 1)\nARGS+=(--master_addr {})"
    script.write_text(SCRIPT.format(body=addr.format("$ADDR")))
    found = read_megatron(str(script), {})
    assert found.seq_length == 16
    assert any("assumes that it is one word" in note for note in found.notes)
    script.write_text(SCRIPT.format(body="ARGS+=(--bf16 $(cat more))"))
    with pytest.raises(InvalidArgument, match=r"needs `\$\(cat more\)` of line 5"):
        read_megatron(str(script), {})
    config = "X=$(cat more)\nARGS+=(--deepspeed_config {})"
    script.write_text(SCRIPT.format(body=config.format("./config.$X.json")))
    (note,) = read_megatron(str(script), {}).notes
    assert note.startswith("./config.$(cat more).json of --deepspeed_config (line 5) is not eval")
    for folder in ("`pwd`", '"$(cd `dirname $0`; cd ..; pwd)"'):
        body = f"cd $ROOT; ARGS+=(--bf16 {folder}/more.py)"
        script.write_text(SCRIPT.format(body=body))
        assert read_megatron(str(script), {}).seq_length == 16
        script.write_text(SCRIPT.format(body=body.replace("--bf16", "--split")))
        with pytest.raises(InvalidArgument, match=r"--split holds [`$].*pwd.* is not ev"):
            read_megatron(str(script), {})
    script.write_text(SCRIPT.format(body="ARGS+=(--bf16 $(cd / && pwd)/more.py)"))
    with pytest.raises(InvalidArgument, match=r"needs .*pwd.* of line 5"):  # it may be nothing
        read_megatron(str(script), {})
    for word in ('"config.$X"', '"a $X"'):  # quoted: one word
        script.write_text(SCRIPT.format(body=config.format(word)))
        assert read_megatron(str(script), {}).notes == ()
    begins = ("$X.json", '"$X.json"', "config.$X", "-/$X", '"-$X"', '$X"/config"')
    for word in begins:  # perhaps others
        script.write_text(SCRIPT.format(body=config.format(word)))
        with pytest.raises(InvalidArgument, match=r"needs `\$\(cat more\)` of line 5"):
            read_megatron(str(script), {})
    script.write_text(SCRIPT.format(body="ARGS+=(--data-path=$(cat more))"))
    with pytest.raises(InvalidArgument, match=r"--data-path .*needs `\$\(cat more\)` of line 5"):
        read_megatron(str(script), {})


def test_a_computed_number_of_processes_is_replaced(tmp_path: Path) -> None:
    """By a world size or a data-parallel size that is given; else it is needed."""
    script = tmp_path / "launch.sh"
    count = "N=$(nvidia-smi -L | wc -l)\ntorchrun {} pretrain_gpt.py --seq-length 8"
    for words in ("--nproc_per_node $N", "--nproc-per-node=$N", '--nnodes "$N" --nproc_per_node 8'):
        script.write_text(count.format(words))
        for given in (Settings(world_size=16), Settings(data_parallel_size=4)):
            assert read_megatron(str(script), {}, over=given).seq_length == 8
        with pytest.raises(InvalidArgument, match=r"needs `\$\(nvidia-smi -L"):
            read_megatron(str(script), {})


def test_blends_of_many_sources_are_appended_line_by_line(tmp_path: Path) -> None:
    script = tmp_path / "launch.sh"
    lines = "".join(
        f'T="${{T}} 14486363187 ${{D}}/stack_{k:04}_text_document"\n' for k in range(90)
    )
    command = "torchrun --nproc_per_node 1 pretrain_gpt.py --seq-length 8 --data-path $T\n"
    script.write_text(f"T=\nD=/{'long' * 20}\n{lines}{command}")
    path = read_megatron(str(script), {}).data_path
    assert path is not None
    assert path[-1] == f"/{'long' * 20}/stack_0089_text_document"
    assert len(path) == 180


def test_a_text_that_another_bash_runs_has_the_exported_variables(tmp_path: Path) -> None:
    script = tmp_path / "launch.sh"
    script.write_text(
        'export RUN="torchrun --nproc_per_node 4"\nSEQ=16\n{}'
        "srun bash -c '$RUN --node_rank $SLURM_PROCID pretrain_gpt.py --seq-length $SEQ' | tee x"
    )
    text = script.read_text()
    script.write_text(text.format("export SEQ\n"))
    found = read_megatron(str(script), {})
    assert (found.seq_length, found.world_size) == (16, 4)
    script.write_text(text.format("export OTHER=3\n"))
    with pytest.raises(InvalidArgument, match=r"--seq-length holds \$SEQ, which is not defined"):
        read_megatron(str(script), {})


def test_capture_starts_no_launcher_and_tells_commands_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    launch = tmp_path / "launch.sh"
    launch.write_text(
        'python -c \'open("made", "w")\'\nsbatch <<END\nsrun bash -c '
        "'WORLD_SIZE=8 python pretrain_gpt.py --seq-length $1 --data-path \"a b\"'\nEND\n"
        "torchrun pretrain_gpt.py --seq-length 32 &\nexit 5\n"
    )
    command = ["capture", "--overwrite", "--", "bash", "launch.sh", "16"]
    assert main(command) == 2
    assert "2 training commands; choose one with --command N" in capsys.readouterr().err
    seen = set()
    for number in ("1", "2"):
        assert main([command[0], "--command", number, "--json", *command[1:]]) == 0
        seen.add(read_megatron("captured.json", {}).seq_length)
        shown = capsys.readouterr()
        assert json.loads(shown.out)["status"] == 5
        assert "runs bash launch.sh" in shown.err
        assert "not started" in shown.err
    assert seen == {16, 32}
    assert not (tmp_path / "made").exists()


def test_launchers_of_the_first_and_last_version_of_python_are_captured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    launch = tmp_path / "launch.sh"
    words = "pretrain_gpt.py --seq-length 8"
    launch.write_text(f"python3.8 {words}\npython3.14 {words}\n")
    assert main(["capture", "--out", str(tmp_path / "c.json"), "--", "bash", str(launch)]) == 2
    assert "2 training commands; choose one" in capsys.readouterr().err


def test_what_was_captured_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["train.py", "--seq-length", "8"]
    call = Call(words, {"WORLD_SIZE": "8", "HOME": "/root", "RANK": "a b"}, "/here")
    monkeypatch.setattr("megaindex.settings.capture.run_recorded", lambda *_: ([call], 0))
    assert main(["capture", "--", "bash", "launch.sh"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "RANK='a b'",
        "WORLD_SIZE=8",
        "train.py --seq-length 8",
        "",
        "wrote captured.json: megaindex plan captured.json",
    ]
    assert kind_of_file("captured.json") == "script"


def test_a_program_that_is_not_there_is_not_captured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["capture", "--out", str(tmp_path / "c.json"), "--", str(tmp_path / "none")]) == 2
    said = capsys.readouterr().err
    assert "none' cannot be started: No such file or directory; give the script's own" in said


def test_a_launcher_that_was_killed_has_no_call(tmp_path: Path) -> None:
    (tmp_path / "call").touch()
    with pytest.raises(InvalidArgument, match="a launcher was killed while it was recorded"):
        _read_call(tmp_path / "call")


CAPTURED: dict[str, Any] = {
    "megaindex_capture": 1, "words": ["train.py", "--seq-length", "8"], "environment": {},
    "folder": "/here",
}  # fmt: skip


@for_each(
    "change",
    [
        {"megaindex_capture": 2},
        {"words": "train.py --seq-length 8"},
        {"words": ["--seq-length", 8]},
        {"environment": None},
    ],
)
def test_a_captured_command_of_another_form_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match="'c.json' is no captured command of version 1"):
        read_capture(json.dumps({**CAPTURED, **change}), "c.json")


def test_a_note_names_the_folder_that_a_command_was_captured_in() -> None:
    notes = read_capture(json.dumps(CAPTURED), "c.json")[2]
    assert notes == ("the command was captured in '/here', to which its paths are relative",)
    assert not read_capture(json.dumps({**CAPTURED, "folder": str(Path.cwd())}), "c.json")[2]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("/bin/true pretrain_gpt.py --seq-length 8", "0 launchers were recorded"),
        ("sleep 60", "ran longer than 1 s and was killed"),
        ("while :; do python x.py; done", "ran longer than 1 s|more than 1000"),
    ],
)
def test_what_capture_cannot_hold_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, reason: str
) -> None:
    (tmp_path / "launch.sh").write_text(text + "\n")
    arguments = ["--timeout", "1", "--out", str(tmp_path / "c.json"), "--", "bash"]
    assert main(["capture", *arguments, str(tmp_path / "launch.sh")]) == 2
    assert re.search(reason, capsys.readouterr().err)
