"""Megatron command lines and scripts as settings."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from megaindex.errors import InvalidArgument, MissingFile, StorageError
from megaindex.recipe.megatron import read_megatron
from megaindex.recipe.settings import resolve
from megaindex.recipe.shell import Script

SCRIPT = r"""#!/bin/bash
# Runs a model.  --seq-length 1
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS_PER_NODE=8
NNODES=${SLURM_NNODES:-4}
WORLD_SIZE=$(($GPUS_PER_NODE*$NNODES))
ROOT="${HOME_OF_DATA}/corpora"
DATA="0.7 $ROOT/web 0.3 ${ROOT}/code"
DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes $NNODES   # four
)
MODEL_ARGS="
    --seq-length 4096 \
    --tensor-model-parallel-size 2
    --pipeline-model-parallel-size=4
"
TRAIN_ARGS=(
    --micro-batch-size 2
    --global-batch-size $((8 * GPUS_PER_NODE))
)
TRAIN_ARGS+=(--train-samples 146484375)
if [ "$1" == "test" ]; then echo 'nothing; --seed 9'; fi
OMP_NUM_THREADS=1 torchrun "${DISTRIBUTED_ARGS[@]}" pretrain_gpt.py \
    $MODEL_ARGS "${TRAIN_ARGS[@]}" \
    --data-path $DATA --split 949,50,1 \
    --rampup-batch-size 16 8 5000 \
    --eval-interval 1000 --eval-iters 10 --bf16 --seed ${SEED-42}
"""


def test_a_launch_script_gives_the_run(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(SCRIPT)
    run = resolve(read_megatron(str(script), {"HOME_OF_DATA": "/lustre"}))
    assert run.order == "megatron"
    assert run.sequence_length == 4096
    assert run.data_parallel_size == 32 // (2 * 4)
    assert run.batch.final == 64
    assert run.batch.stages[0] == (0, 16)
    assert run.gradient_accumulation_steps == 8
    assert [(s.path, s.weight) for s in run.data.train] == [
        ("/lustre/corpora/web", 0.7),
        ("/lustre/corpora/code", 0.3),
    ]
    assert run.data.split == "949,50,1"
    assert (run.target.kind, run.target.value) == ("samples", 146484375)
    assert (run.evaluation.interval, run.evaluation.iterations) == (1000, 10)
    assert run.seed == 42


def test_one_line_of_arguments() -> None:
    settings = read_megatron(
        "--seq-length=1024 --data-path a b --train-iters 10 --micro-batch-size 4 "
        "--phase-transition-iterations 3 6 --eval-global-batch-size 8 "
        "--step-batch-size-schedule '0:4 1M:8' --seq-length 2048",
        {},
    )
    assert settings.seq_length == 2048
    assert settings.data_path == ("a", "b")
    assert settings.phase_transition_iterations == (3, 6)
    assert settings.eval_global_batch_size == 8
    assert settings.batch_schedule == "0:4 1M:8"
    assert settings.split == "969,30,1"
    assert settings.variance_buffer is None
    assert settings.world_size is None


def test_the_surplus_is_the_buffer_of_weighted_blends_alone() -> None:
    surplus = "--mid-level-dataset-surplus 0.01 --data-path"
    assert read_megatron(f"{surplus} 1 a 2 b", {}).variance_buffer == "1.01"
    assert read_megatron(f"{surplus} a b c", {}).variance_buffer is None


def test_blends_in_files(tmp_path: Path) -> None:
    words, splits = tmp_path / "words", tmp_path / "splits.json"
    words.write_text("0.5 a\n0.5 b\n")
    splits.write_text('{"train": ["0.5", "a", "0.5", "b"], "valid": ["c"], "test": null}')
    assert read_megatron(f"--data-args-path {words}", {}).data_path == ("0.5", "a", "0.5", "b")
    settings = read_megatron(f"--per-split-data-args-path {splits}", {})
    assert settings.train_data_path == ("0.5", "a", "0.5", "b")
    assert settings.valid_data_path == ("c",)
    assert settings.test_data_path is None


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("--data-path $NOWHERE", r"--data-path holds \$NOWHERE, which is not defined"),
        ("--data-path $(ls)", r"--data-path holds \$\(ls\)"),
        ("--train-iters ${I}", r"--train-iters holds \$\{I\}"),
        ("--train-iters many", "--train-iters must be a whole number, got 'many'"),
        ("--seq-length --bf16", "--seq-length has no value"),
        ("--bf16 --fp8", "no Megatron argument"),
        ("--mid-level-dataset-surplus x --data-path 1 a", "must be a number, got 'x'"),
    ],
)
def test_bad_arguments_are_named(source: str, reason: str) -> None:
    with pytest.raises(InvalidArgument, match=reason):
        read_megatron(source, {})


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(MissingFile, match="does not exist"):
        read_megatron(str(tmp_path / "none.sh"), {})
    with pytest.raises(StorageError, match="cannot be read"):
        read_megatron(str(tmp_path), {})
    with pytest.raises(StorageError, match="--data-args-path: /none cannot be read"):
        read_megatron("--data-args-path /none", {})
    bad = tmp_path / "bad.json"
    for text in ("[1]", "[" * 100_000, "9" * 5000):
        bad.write_text(text)
        with pytest.raises(InvalidArgument, match="is not JSON with lists"):
            read_megatron(f"--per-split-data-args-path {bad}", {})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("run a 'b c' \"d e\"", ["run", "a", "b c", "d e"]),
        ("X=1; run $X ${X} \"$X\" '$X'", ["run", "1", "1", "1", "$X"]),
        ('X="1 2"; run $X "$X"', ["run", "1", "2", "1 2"]),
        ("A=(x 'y z'); run ${A[@]} \"${A[@]}\"", ["run", "x", "y", "z", "x", "y z"]),
        ("A=(x); A+=(y); run ${A[*]}", ["run", "x", "y"]),
        ("run ${X:-3} ${Y-4}", ["run", "3", "4"]),
        ("X=5; run ${X:-3}", ["run", "5"]),
        ("N=3; run $((N * 2 + 1)) $(( (${N} - 1) / 2 ))", ["run", "7", "1"]),
        ("run $((1 / 0)) $MISSING", ["run", "$((1 / 0))", "$MISSING"]),
        ("run a \\\n  b # comment\n", ["run", "a", "b"]),
        ("run 'a # b' c#d", ["run", "a # b", "c#d"]),
        ("export X=7 && run $X", ["run", "7"]),
        ("X=1 run a", ["run", "a"]),
    ],
)
def test_words_are_what_the_shell_would_pass(text: str, words: list[str]) -> None:
    commands = Script(text, {}).commands
    assert commands[-1] == words


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
@pytest.mark.parametrize(
    "text",
    [
        'A=(1 \'2 3\' "$HOME_OF_DATA/x y")\nB="p q"\nrun ${A[@]} "${A[@]}" $B "$B" \'$B\' x$B',
        'N=4; M=$((N*2)); run $M $((M/N)) $(( (M + 1) % 5 )) ${M}x "$M $N"',
        'A=(--a 1) # c\nA+=(\n  --b "2 3" # d\n  --c=4\n)\nrun "${A[@]}" \\\n  --last',
        'X=; run "$X" ${X:-d} ${UNSET_HERE:-e} "${UNSET_HERE:-f g}" a\\ b \'c\'"d"e',
        'export P="a" Q=b && run $P$Q "$P"\'$Q\'',
    ],
)
def test_words_are_what_bash_passes(text: str) -> None:
    environment = {"HOME_OF_DATA": "/lustre"}
    shown = subprocess.run(
        ["bash", "-c", "run() { printf '%s\\0' run \"$@\"; }\n" + text],
        env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert Script(text, environment).commands[-1] == shown.stdout.split("\0")[:-1]
