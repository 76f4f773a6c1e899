"""Megatron command lines and scripts as settings."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support.inputs import for_each

from megaindex.errors import InvalidArgument, MissingFile, StorageError
from megaindex.settings import shell
from megaindex.settings.arguments import read_settings
from megaindex.settings.megatron_args import read_megatron
from megaindex.settings.run_builder import resolve
from megaindex.settings.settings import Settings, merged
from megaindex.settings.shell import Script, is_several

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
    assert run.row.order == "megatron"
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


def test_a_launcher_without_its_program_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="no Megatron argument in 'torchrun --nproc 2 -m'"):
        read_megatron("torchrun --nproc 2 -m", {})


def test_a_module_is_named_by_its_path() -> None:
    with pytest.raises(
        InvalidArgument, match="no Megatron argument in .*; it starts tools/prep; gi"
    ):
        read_megatron("python -m tools.prep --\n", {})
    words = "--data-path a --seq-length 8 --global-batch-size 4 --train-iters 3"
    for program, said in (
        ("torchrun -m my.trainer", "my/trainer is not a program of Megatron-LM"),
        ("$(which python) -m my.trainer", "my/trainer is not a program of Megatron-LM"),
        ("uv run -m my.trainer", "my/trainer is not a program of Megatron-LM"),
        ("python -m torch.distributed.run x/trainer.py", "x/trainer.py is not a program of Mega"),
    ):
        assert any(said in note for note in read_megatron(f"{program} {words}", {}).notes)


def test_one_line_of_arguments() -> None:
    settings = read_megatron(
        "--seq-length=1024 --data-path a b --train-iters 10 --micro-batch-size 4 "
        "--eval-global-batch-size 8 "
        "--step-batch-size-schedule '0:4 1M:8' --seq-length 2048",
        {},
    )
    assert settings.seq_length == 2048
    assert settings.data_path == ("a", "b")
    assert settings.eval_global_batch_size == 8
    assert settings.batch_schedule == "0:4 1M:8"
    assert settings.split == "969,30,1"
    assert settings.variance_buffer is None
    assert settings.world_size is None


def test_the_surplus_is_the_buffer_of_weighted_blends_alone() -> None:
    surplus = "--mid-level-dataset-surplus 0.01 --data-path"
    rest = "--seq-length 8 --global-batch-size 2 --train-iters 3 --eval-interval 1"
    for blend, buffer in (("1 a 2 b", 1.01), ("a b c", 1.0)):
        run = resolve(read_megatron(f"{rest} {surplus} {blend}", {}))
        weighted = run.data.train[0].weight is not None
        assert run.row.default_buffer(weighted=weighted) == buffer


def test_blends_in_files(tmp_path: Path) -> None:
    words, splits = tmp_path / "words", tmp_path / "splits.json"
    words.write_text("0.5 a\n0.5 b\n")
    splits.write_text('{"train": ["0.5", "a", "0.5", "b"], "valid": ["c"], "test": null}')
    settings = read_megatron(f"--data-args-path {words} --split 1,0,0", {})
    assert settings.data_path == ("0.5", "a", "0.5", "b")
    settings = read_megatron(f"--per-split-data-args-path {splits}", {})
    assert settings.train_data_path == ("0.5", "a", "0.5", "b")
    assert settings.valid_data_path == ("c",)
    assert settings.test_data_path is None


@for_each(
    ("source", "reason"),
    [
        ("--data-path $NOWHERE", r"--data-path holds \$NOWHERE, which is not defined"),
        ("--data-path $(ls)", r"--data-path holds \$\(ls\)"),
        ("--train-iters ${I}", r"--train-iters holds \$\{I\}"),
        ("--train-iters many", "--train-iters must be an integer, got 'many'"),
        ("--seq-length --bf16", "--seq-length has no value"),
        ("--bf16 --fp8", "no Megatron argument"),
    ],
)
def test_bad_arguments_are_named(source: str, reason: str) -> None:
    with pytest.raises(InvalidArgument, match=reason):
        read_megatron(source, {})


def test_a_file_of_a_blend_needs_a_split(tmp_path: Path) -> None:
    (tmp_path / "words").write_text("1 a 1 b")
    given = f"--data-args-path {tmp_path}/words --seq-length 8"
    with pytest.raises(InvalidArgument, match="--data-args-path needs --split: Megatron-LM stops"):
        read_megatron(given, {})
    assert read_megatron(f"{given} --split 1,0,0", {}).data_path == ("1", "a", "1", "b")
    assert read_megatron(given, {}, over=Settings(split="1,0,0")).data_path


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(MissingFile, match="does not exist"):
        read_megatron(str(tmp_path / "none.sh"), {})
    with pytest.raises(StorageError, match="cannot be read|regular file"):
        read_megatron(str(tmp_path), {})
    with pytest.raises(MissingFile, match="--data-args-path: /none does not exist"):
        read_megatron("--data-args-path /none", {})
    bad = tmp_path / "bad.json"
    for text in ("[1]", "[" * 100_000, "9" * 5000):
        bad.write_text(text)
        with pytest.raises(InvalidArgument, match="is not JSON with lists"):
            read_megatron(f"--per-split-data-args-path {bad}", {})


def commands_of(text: str, environment: dict[str, str]) -> list[list[str]]:
    script = Script(text, environment)
    return [[script.written(word) for word in one.words] for one in script.commands]


@for_each(
    ("text", "words"),
    [
        ("run a 'b c' \"d e\"", ["run", "a", "b c", "d e"]),
        ("X=1; run $X ${X} \"$X\" '$X'", ["run", "1", "1", "1", "$X"]),
        ('X="1 2"; run $X "$X"', ["run", "1", "2", "1 2"]),
        ("A=(x 'y z'); run ${A[@]} \"${A[@]}\"", ["run", "x", "y", "z", "x", "y z"]),
        ("A=(x 'y z'); run $A \"$A\"", ["run", "x", "x"]),
        ("set -- x 'y z'; run $@ \"$@\"", ["run", "x", "y", "z", "x", "y z"]),
        ("A=(x); A+=(y); run ${A[*]}", ["run", "x", "y"]),
        ("A=(); A+=x; run $A", ["run", "x"]),
        ("run ${X:-3} ${Y-4}", ["run", "3", "4"]),
        ("X=5; run ${X:-3}", ["run", "5"]),
        ("N=3; run $((N * 2 + 1)) $(( (${N} - 1) / 2 ))", ["run", "7", "1"]),
        ("run $MISSING $((MISSING))", ["run", "$MISSING", "0"]),
        ("run `A` {1,2} ${X/.*} <(b)", ["run", "`A`", "{1,2}", "${X/.*}", "<(b)"]),
        (
            "X=/a/b.c.d; run ${X%.*} ${X%%.*} ${X#*/} ${X##*/}",
            ["run", "/a/b.c", "/a/b", "a/b.c.d", "b.c.d"],
        ),
        ("X=abc; A=(x 'y z'); run ${#X} ${#A[@]} ${X%d} ${X#a}", ["run", "3", "2", "abc", "bc"]),
        ("X='run --a \"b c\" $Y'; Y=3; eval $X", ["run", "--a", "b c", "3"]),
        ("run a \\\n  b # comment\n", ["run", "a", "b"]),
        ("run 'a # b' c#d", ["run", "a # b", "c#d"]),
        ("export X=7 && run $X", ["run", "7"]),
        ("X=1 run a", ["run", "a"]),
        ("$NOPE run a", ["run", "a"]),
        ('A=$(ls); A=x; run "${A[@]}"', ["run", "x", "A"]),
        ('A=($(ls)); A=x; run "${A[@]}"', ["run", "x", "A"]),
        ('A=($(ls) y); A=x; run "${A[@]}"', ["run", "x", "A"]),
        ('A=(x y); A=z; run "${A[@]}"', ["run", "z", "y"]),
    ],
)
def test_words_are_what_the_shell_would_pass(text: str, words: list[str]) -> None:
    assert commands_of(text, {})[-1] == words


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
    commands = commands_of(text, environment)
    assert [word for command in commands for word in command] == shown.stdout.split("\0")[:-1]


def flags(extra: str = "", batch: str = "--global-batch-size 4", **over: Any) -> Settings:
    text = f"--data-path a --seq-length 16 {batch} --train-samples 40 {extra}"
    return read_megatron(text, {}, over=Settings(**over))


@for_each(
    ("argument", "reason"),
    [
        ("--sft", "--sft is not planned"),
        ("--mock-data", "pass --data-path, or --tokens-per-epoch"),
        ("--perform-rl-step", "reinforcement learning"),
        ("--dataloader-type external", "--dataloader-type external is not planned"),
        ("--seq-lenght 8", "did you mean --seq-length"),
        ("--valid-data-path b", "--data-path and --valid-data-path exclude each other"),
        ("--data-args-path b", "--data-args-path: b does not exist"),
        ("--encoder-seq-length 8", "exclude each other"),
        ("--step-batch-size-schedule 0:4", "exclude each other in Megatron-LM"),
        ("--step-batch-size-schedule 0:4 1M:8", "takes one word, got '0:4 1M:8'"),
        ("--train-iters 3 --phase-transition-iterations 2", "needs --train-samples"),
        ("--skip-train yes", "takes no value"),
    ],
)
def test_what_megatron_refuses_or_no_plan_is_made_of(argument: str, reason: str) -> None:
    with pytest.raises((InvalidArgument, StorageError), match=re.escape(reason)):
        resolve(flags(argument))


@for_each(
    ("command", "program"),
    [("torchrun --nproc_per_node 8 pretrain_bert.py", "pretrain_bert.py"),
     ("python x/pretrain_t5.py", "x/pretrain_t5.py"),
     ("python multimodal/train.py", "multimodal/train.py"),
     ("python3.12 -m pretrain_bert", "pretrain_bert"),
     ("torchrun -m x.pretrain_t5", "x/pretrain_t5"),
     ("python -m torch.distributed.run -m pretrain_ict", "pretrain_ict"),
     ("accelerate launch -m examples.mimo.pretrain_mimo", "examples/mimo/pretrain_mimo"),
     ("numactl -m 0 python pretrain_bert.py", "pretrain_bert.py"),
     ("srun -m block torchrun pretrain_bert.py", "pretrain_bert.py")],
)  # fmt: skip
def test_programs_of_other_data_are_refused(command: str, program: str) -> None:
    with pytest.raises(InvalidArgument, match=f"--megatron-args: {program} is not planned"):
        read_megatron(f"{command} --seq-length 8 --train-iters 3", {})


@for_each("command", [
    "torchrun --nproc_per_node 8 -m pretrain_gpt", "torchrun --nproc_per_node 8 pretrain_gpt.py",
    "numactl -m 0 python -m torch.distributed.run --nproc_per_node 8 -m x.pretrain_mamba",
    "srun -m block torchrun --nproc_per_node 8 x/pretrain_gpt.py",
    "torchrun --nproc_per_node 8 -m megaindex.adapters.megatron --keys -- pretrain_gpt.py",
])  # fmt: skip
def test_programs_and_modules_of_gpt_data_are_planned(command: str) -> None:
    settings = read_megatron(f"{command} --seq-length 8 --train-iters 3", {})
    assert settings.world_size == 8
    assert not any("is not a program of Megatron-LM" in note for note in settings.notes)


def test_arguments_that_change_nothing_are_listed() -> None:
    run = resolve(flags("--fim-data --num-workers 3 --no-such-thing --bf16 --num-layers 3"))
    assert run.ignored == ("--fim-data", "--num-workers", "--no-such-thing")
    assert any(note.startswith("--no-such-thing is not an argument") for note in run.notes)
    words = "--mock-data --seq-length 16 --global-batch-size 4 --train-iters 3"
    assert read_megatron(words, {}, over=Settings(data_path=("b",))).ignored == ("--mock-data",)


def test_exact_epochs_of_megatron_deepspeed_are_off_by_default() -> None:
    found = flags("--train-data-exact-num-epochs -1")
    assert (found.order, found.train_data_exact_num_epochs) == ("megatron-legacy", None)
    assert flags("--train-data-exact-num-epochs 2").train_data_exact_num_epochs == 2


@pytest.mark.parametrize(
    "words",
    [
        "--deepspeed",
        "--deepspeed_config ds.json",
        "--zero-stage=1",
        "--ds-sequence-parallel-size 1",
    ],
)
def test_scripts_of_megatron_deepspeed_have_its_order(words: str) -> None:
    """Its own arguments are known, and --split has no meaning beside --train-data-path."""
    text = "--seq-length 16 --train-samples 40 --no-query-key-layer-scaling --train-data-path a"
    found = read_megatron(f"{text} {words} --split 9,1,0", {})
    assert (found.order, found.split, found.notes) == ("megatron-legacy", None, ())
    assert "--split" in found.ignored
    assert "--split" not in read_megatron(f"{text} {words}", {}).ignored
    found = read_megatron(text, {})
    assert (found.order, len(found.notes)) == ("megatron", 2)


def test_megatron_deepspeed_divides_sequences_over_ranks() -> None:
    text = "--seq-length 8 --micro-batch-size 2 --train-iters 5 --data-path a {}"
    given = Settings(world_size=8)
    for words, size in (("--ds-sequence-parallel-size 4", 4), ("--deepspeed", 16)):
        run = resolve(merged(read_megatron(text.format(words), {}, over=given), given))
        assert run.batch.final == size


@pytest.mark.parametrize(
    ("length", "refused"),
    [
        ("--train-samples 1000", False),
        ("--train-samples 1001", True),
        ("--train-iters 100 --global-batch-size 10", False),
        ("--train-iters 101 --global-batch-size 10", True),
        ("--train-iters 1", True),  # the batch is not known
    ],
)
def test_megatron_deepspeed_ends_at_its_tokens(length: str, refused: bool) -> None:
    text = f"--seq-length 128 --deepspeed --data-path a --train-tokens 128000 {length}"
    if not refused:
        assert "--train-tokens" in read_megatron(text, {}).ignored
        return
    with pytest.raises(InvalidArgument, match="--train-tokens 128000 ends the run before the sam"):
        read_megatron(text, {})
    assert read_megatron(text, {}, over=Settings(train_samples="900")).order == "megatron-legacy"


def test_what_megatron_deepspeed_stops_at() -> None:
    text = "--seq-length 8 --global-batch-size 4 --deepspeed --data-path {} --train-iters 5"
    with pytest.raises(InvalidArgument, match="takes one path, or a weight before each"):
        read_megatron(text.format("a b"), {})
    for paths in ("a", "1 a", "1 a 2 b"):
        assert read_megatron(text.format(paths), {}).order == "megatron-legacy"
    for words in ("--data-efficiency-curriculum-learning", "--train-doc-idx-path a.npy"):
        with pytest.raises(InvalidArgument, match=f"{words.split()[0]} is not planned"):
            read_megatron(f"{text.format('a')} {words}", {})
    (note,) = read_megatron(text.format("a") + " --repeated-dataloader", {}).notes
    assert note.startswith("--repeated-dataloader begins the samples anew")
    ramp = text.format("a") + " --rampup-batch-size 2 2 8"
    with pytest.raises(InvalidArgument, match="Megatron-DeepSpeed stops with an AssertionError"):
        resolve(read_megatron(ramp, {}))
    assert resolve(read_megatron(ramp.replace("--train-iters 5", "--train-samples 50"), {}))


def test_a_script_that_changes_its_folder_is_said(tmp_path: Path) -> None:
    script = tmp_path / "launch.sh"
    for cd, path, noted in (
        ("cd sub", "data/web", True),
        ("cd sub", "1 /data/web", False),
        ("cd sub", "/d s3://b/c", False),
        ("cd sub", "1 web", True),
        ("", "data/web", False),
    ):
        words = f"--seq-length 8 --global-batch-size 4 --train-iters 5 --data-path {path}"
        script.write_text(f"{cd}\ntorchrun --nproc_per_node 1 pretrain_gpt.py {words}\n")
        notes = read_megatron(str(script), {}).notes
        assert any("changes its folder" in note for note in notes) == noted, (cd, path)


def test_the_batch_that_megatron_counts_by_under_a_step_schedule() -> None:
    """Its global_batch_size is one micro batch on every rank, and sizes the evaluations."""
    text = (
        "--data-path a --seq-length 16 --micro-batch-size 2 --train-iters 8 --eval-iters 3 "
        "--eval-interval 4 --step-batch-size-schedule '0:4 160:12'"
    )
    ranks = Settings(world_size=2)
    run = resolve(merged(read_megatron(text, {}, over=ranks), ranks))
    assert (run.nominal_batch, run.batch.final) == (4, 12)
    run = resolve(read_megatron(text.replace("--micro-batch-size 2 ", ""), {}, over=Settings()))
    assert run.nominal_batch == 12


def test_the_release_is_the_default_or_one_that_knows_the_arguments() -> None:
    def release(extra: str, **over: Any) -> str:
        batch = "" if "schedule" in extra else "--global-batch-size 4"  # they exclude each other
        run = resolve(merged(flags(extra, batch, **over), Settings(**over)))
        return run.version.name if run.version else ""

    assert release("--eval-interval 3") == "0.16.1"
    assert release("--start-eval-at-iter 3") == "main"
    assert release("", framework_version="0.15.3") == "0.15.3"
    for extra, first, before in (
        ("--full-validation", "0.14.0", "0.13.1"),
        ("--multiple-validation-sets", "0.14.0", "0.13.1"),
        ("--start-eval-at-iter 3", "0.18.0", "0.17.0"),
        ("--eval-global-batch-size 8", "0.18.0", "0.17.0"),
        ("--eval-micro-batch-size 1", "0.18.0", "0.17.0"),
        ("--step-batch-size-schedule '0:4 160:12'", "0.18.0", "0.17.0"),
        ("--phase-transition-iterations 4", "0.16.0", "0.15.0"),
    ):
        assert release(extra, framework_version=first) == first
        with pytest.raises(InvalidArgument, match=f"came with megatron-core {first[:4]}, and"):
            release(extra, framework_version=before)
    with pytest.raises(InvalidArgument, match="came with megatron-core 0.18"):
        release("--start-eval-at-iter 3", framework_version="0.16.1")
    with pytest.raises(InvalidArgument, match="'0.99' is not a release"):
        release("", framework_version="0.99")


def test_a_ramp_is_made_before_0_18_and_ignored_after() -> None:
    """43 and 55 iterations: update_train_iters of Megatron-LM main d98e8a64 and of 0.16.1."""
    text = "--rampup-batch-size 4 4 100 --global-batch-size 8 --train-samples 345"
    for release, count, ignored in (("main", 43, ("--rampup-batch-size",)), ("0.16.1", 55, ())):
        over = Settings(framework_version=release)
        run = resolve(merged(flags(text), over))
        assert (run.batch.iterations_for(345), run.ignored) == (count, ignored)


LAUNCH = r"""
if [ "${SCALE:-big}" = small ]; then GBS=8
elif [[ "${SCALE:-big}" == big ]]; then GBS=16
else exit 1
fi
if [ "$1" == --data ]; then
    DATA="$2"; shift 2
elif [ $# -gt 0 ]; then
    echo "unknown $1" >&2; exit 1
fi
if [ ! -d "$HOME/none" ]; then echo "no folder"; exit 1; fi
DATA_ARGS=()
if [[ -z "$DATA" ]]; then
    DATA_ARGS+=("--mock-data")
else
    DATA_ARGS+=(--data-path $DATA --split '99,1,0')
fi
[ "$GBS" -eq 16 ] && LENGTH=$((GBS * 4)) || LENGTH=1
CMD="${PROFILE-} python -u /x/pretrain_gpt.py ${DATA_ARGS[@]} --seq-length $LENGTH \
  --global-batch-size $GBS --train-samples 100 --eval-interval 3 --save ${OUT}"
cd /x; srun -l $CMD 2>&1 | tee ${OUT}/log
"""


def test_conditions_and_parameters(tmp_path: Path) -> None:
    script = tmp_path / "launch.sh"
    script.write_text(LAUNCH)
    settings = read_megatron(str(script), {}, ["--data", "web"])
    assert settings.data_path == ("web",)
    assert settings.split == "99,1,0"
    assert (settings.seq_length, settings.global_batch_size) == (64, 16)
    with pytest.raises(InvalidArgument, match="--mock-data is not planned"):
        read_megatron(str(script), {})
    with pytest.raises(InvalidArgument, match=r"exits at"):
        read_megatron(str(script), {}, ["--help"])


def test_parameters_that_no_flag_replaces_are_named(tmp_path: Path) -> None:
    script = tmp_path / "launch.sh"
    script.write_text("DATA=$5\ntorchrun pretrain_gpt.py --data-path $DATA --seq-length 8")
    with pytest.raises(InvalidArgument, match=r"--script-args, at least 5, or --data-path"):
        read_megatron(str(script), {})
    assert read_megatron(str(script), {}, list("abcde")).data_path == ("e",)
    assert read_megatron(str(script), {}, over=Settings(data_path=("x",))).data_path is None


def test_parameters_are_one_quoted_text_or_words(tmp_path: Path) -> None:
    script = tmp_path / "launch.sh"
    script.write_text('torchrun pretrain_gpt.py --seq-length $1 --data-path "$2" --split "$3"')
    for words, path in (
        ("8 web 9,1,0", "web"), (["8 web 9,1,0"], "web"), (["8", "a b", "9,1,0"], "a b"),
    ):  # fmt: skip
        settings = read_settings({"megatron_args": str(script), "script_args": words})
        assert (settings.seq_length, settings.data_path) == (8, (path,))
    script.write_text('torchrun pretrain_gpt.py --seq-length $1 --data-path "$2"')
    settings = read_settings({"megatron_args": str(script), "script_args": ["8", "a b"]})
    assert settings.data_path == ("a b",)


def test_the_most_unknown_words_of_a_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shell, "_MOST_UNKNOWN", 3)
    text = "run $(a) $(b) $(c)"
    assert commands_of(text, {})[-1] == text.split()
    with pytest.raises(InvalidArgument, match="line 1: `that many unknown words` is not evaluated"):
        commands_of(f"{text} $(d)", {})


@for_each(
    ("construct", "line"),
    [
        ("usage() { exit 1; }", 3),
        ("for S in 1 2; do LENGTH=$S; done", 3),
        ("while [[ $# -gt 0 ]]; do shift; done", 3),
        ("case $1 in a) LENGTH=9 ;; esac", 3),
        ("declare -r LENGTH=9", 3),
        ("shopt -s extglob", 3),
        ("[ -f x ] && torchrun pretrain_gpt.py --seq-length 9", 3),
        ("eval $(cat x)", 3),
        ("LENGTH=$((1 / 0))", 3),
        (": ${LENGTH:=9}", 3),
        ("if true; then fi", 3),
        ("set -u; LENGTH=$((NOPE + 1))", 3),
        ("time LENGTH=9", 3),
        ("A=(1 2)9", 3),
        (": ${NOPE:-'a b'}", 3),
        ("X=$(ls); : ${X:?is empty}", 3),
        ("X='\U000f0000'", 1),
    ],
)
def test_what_is_not_evaluated_is_refused_with_its_line(construct: str, line: int) -> None:
    text = f"LENGTH=8\n# {construct}\n{construct}\npython pretrain_gpt.py --seq-length $LENGTH"
    with pytest.raises(InvalidArgument, match=rf"line {line}: .*megaindex capture"):
        read_megatron(text, {})


def test_what_an_unknown_condition_decides_is_unknown() -> None:
    text = "A=8 B=8\nif [ -f x ]; then A=9; echo; fi\npython pretrain_gpt.py --seq-length ${}"
    with pytest.raises(InvalidArgument, match=r"`if .* of line 2.*capture"):
        read_megatron(text.format("A"), {})
    assert read_megatron(text.format("B"), {}).seq_length == 8


def test_a_first_element_is_set_of_what_may_be_an_array() -> None:
    words = {
        "A=(1 2)": ["3", "2"],
        "A=1": ["3"],
        "A=$(cat f)": ["3", "several"],
        "if cmd; then A=(1 2); else A=1; fi": ["3", "several"],
    }
    for set_first, expected in words.items():
        _, *found = Script(f'{set_first}; A=3; run "${{A[@]}}"', {}).commands[-1].words
        assert ["several" if is_several(word) else word for word in found] == expected


def test_the_folder_that_a_script_is_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PWD is kept where it names this folder, as in Bash."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    monkeypatch.chdir(tmp_path / "real")
    here, link = (str(tmp_path / name) for name in ("real", "link"))
    for said, expected in ((link, link), (here, here), ("..", here), (".", here), ("", here)):
        (command,) = Script("run $PWD", {"PWD": said}).commands
        assert command.words == ["run", expected]


def test_a_sourced_file_beside_the_script_is_read(tmp_path: Path) -> None:
    (tmp_path / "conf.sh").write_text("LENGTH=32\n")
    script = tmp_path / "launch.sh"
    script.write_text('. "$(dirname "$0")/conf.sh"\npython pretrain_gpt.py --seq-length $LENGTH')
    assert read_megatron(str(script), {}).seq_length == 32


@for_each(
    ("words", "reason"),
    [
        ("--data-path b --dataloader-fast-cache-load --data-cache-path c", "exclude each other"),
        ("--train-data-path b --dataloader-fast-cache-load", "needs --data-cache-path"),
        ("--data-path b --hybrid-context-parallel", "needs --calculate-per-token-loss"),
        ("--data-path '0.5 b 0.5 c'", "remove the quotes"),
        ("--data-path 50% b 50% c", "50% is not a weight; write the number alone, 50"),
        ("--data-path b 0.5 c 0.5", "write 0.5 before"),
    ],
)
def test_mistakes_in_data_arguments_are_named(words: str, reason: str) -> None:
    base = "--seq-length 8 --train-iters 3 --global-batch-size 2 --eval-interval 9 "
    with pytest.raises(InvalidArgument, match=re.escape(reason)):
        resolve(read_megatron(base + words, {}))


@pytest.mark.parametrize(
    "words",
    [
        "--train-data-path b --dataloader-fast-cache-load --data-cache-path c",
        "--data-path b --hybrid-context-parallel --calculate-per-token-loss",
        "--data-path b c",
        "--data-path 0.5 b",
        "--data-path b 0.5 c",
    ],
)
def test_what_resembles_these_mistakes_is_read(words: str) -> None:
    base = "--seq-length 8 --train-iters 3 --global-batch-size 2 --eval-interval 9 "
    assert resolve(read_megatron(base + words, {})).data.train
