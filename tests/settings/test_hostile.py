"""Scripts, configurations and settings that once ran forever, ate all memory, or failed untyped."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.bounds import check_bounds
from support.command_line import cli
from support.inputs import for_each

from megaindex.errors import InvalidArgument, MegaIndexError, StorageError
from megaindex.settings import batch_schedule
from megaindex.settings.batch_schedule import parse_count, ramp_up
from megaindex.settings.capture import _read_call
from megaindex.settings.llm_foundry_yaml import _resolved
from megaindex.settings.megatron_args import read_megatron
from megaindex.settings.nanotron_yaml import read_nanotron
from megaindex.settings.neox_yaml import neox_settings, read_neox
from megaindex.settings.recipe_file import read_recipe
from megaindex.settings.run_builder import resolve
from megaindex.settings.settings import Settings
from megaindex.settings.yaml_sections import parse_yaml


@for_each("text", ["1e999999999", "1e9999999T", "1E+99999", "1/0", "", "T"])
def test_counts_that_are_none_or_too_long_to_write(text: str) -> None:
    with pytest.raises(InvalidArgument, match="is not a whole number"):
        parse_count(text, "--train-samples")


@pytest.mark.parametrize(("samples", "final"), [(2**62, 2**61), (2**60, 3), (10, 1_000_002)])
def test_ramps_of_more_steps_than_doubles_tell_apart(samples: int, final: int) -> None:
    with pytest.raises(InvalidArgument, match="at most 1000000 over"):
        ramp_up(1, 1, samples, final, "--rampup-batch-size")


def test_the_longest_ramp_that_doubles_tell_apart() -> None:
    ramp = ramp_up(1, 1, 2**53, 3, "--rampup-batch-size")
    assert ramp.stages == ((0, 1), (2**52, 2), (2**53, 3))
    with pytest.raises(InvalidArgument, match="at most 1000000 over"):
        ramp_up(1, 1, 2**53 + 1, 3, "--rampup-batch-size")


def test_ramps_of_the_most_increments_and_one_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_schedule, "_MOST_INCREMENTS", 1000)
    assert len(ramp_up(1, 1, 2000, 1001, "--rampup-batch-size").stages) == 1001
    with pytest.raises(InvalidArgument, match="at most 1000 over"):
        ramp_up(1, 1, 2000, 1002, "--rampup-batch-size")


def nested(levels: int) -> Any:
    return functools.reduce(lambda value, _: [value], range(levels), 7)


def merged(entries: int) -> object:
    """Read a mapping of so many entries, 99,900 of them merged and one the merge key."""
    named = "".join(f"  k{k}: 1\n" for k in range(100))
    own = "".join(f"  own{k}: 1\n" for k in range(entries - 99_901))
    text = f"a: &a\n{named}b:\n  <<: [{', '.join(['*a'] * 999)}]\n{own}"
    return parse_yaml(text.encode(), "f", "--recipe")


@for_each(
    ("make", "inside", "outside", "says"),
    [
        (lambda depth: _resolved({"max_seq_len": nested(depth)}, "f"), [100], [101], "to too many"),
        (
            lambda size: _resolved({"max_seq_len": "x" * size}, "f"),
            [1_000_000],
            [1_000_001],
            "to too many",
        ),
        (
            lambda size: read_megatron("python t.py --seq-length 8\n".ljust(size, "#"), {}),
            [1 << 18],
            [(1 << 18) + 1],
            "a text of that size",
        ),
        (merged, [100_000], [100_001], "expand to more than 100000 entries"),
    ],
)
def test_sizes_on_both_sides_of_a_bound(
    make: Callable[[Any], object], inside: list[Any], outside: list[Any], says: str
) -> None:
    check_bounds(make, inside, outside, says)


def test_the_longest_recorded_command_and_one_byte_more(tmp_path: Path) -> None:
    path = tmp_path / "call"
    call = json.dumps({"words": ["x"], "environment": {}, "folder": "/"})
    path.write_text(call.ljust(1 << 24))
    assert _read_call(path).words == ["x"]
    path.write_text(call.ljust((1 << 24) + 1))
    with pytest.raises(InvalidArgument, match="more than 16777216 bytes"):
        _read_call(path)


def test_samples_of_no_tokens() -> None:
    with pytest.raises(InvalidArgument, match="--seq-length must be from 1 to 2147483646"):
        Settings(seq_length=0, batch_schedule="0:1")


def doubling(line: str, seed: str) -> str:
    return seed + "".join(line.format(old=k, new=k + 1) for k in range(60))


@pytest.mark.parametrize(
    ("line", "seed"),
    [
        ("V{new}=$V{old}$V{old}\n", "V0=xx\n"),
        ('A{new}=("${{A{old}[@]}}" "${{A{old}[@]}}")\n', "A0=(x y)\n"),
    ],
)
def test_values_that_double_are_refused(line: str, seed: str) -> None:
    with pytest.raises(InvalidArgument, match="an expansion of that length"):
        read_megatron(doubling(line, seed) + "python pretrain_gpt.py --seq-length 8\n", {})


@for_each(
    "text",
    [
        "A='$((A))'\nB=$A$((A))${A}",
        "A='$((A+A*A-A))$((A))'\nB=$((A+$((A))+A))",
        "B=$((" + "-" * 100_000 + "1))",
        "B=$((" + "(" * 100_000 + "1))",
        "B=$((" + "1+" * 100_000 + "1))",
        'B="' + "$((" * 100_000 + '"',
        "if " * 5000,
        "f() { f; }\nf",
        "while :; do :; done",
        "{ " * 5000,
        "eval 'A=1; " * 100,
        "case x in",
        "case x in x",
        "for a in b",
    ],
)
def test_scripts_without_end_or_with_an_error(text: str) -> None:
    """What they set is unknown, or they are refused."""
    with pytest.raises(InvalidArgument):
        read_megatron(f"{text}\npython pretrain_gpt.py --seq-length $B\n", {})


@pytest.mark.parametrize(
    ("words", "world_size"),
    [
        ("", 8),
        ("--nproc_per_node --nnodes 2", None),
        ("--nproc_per_node 8 --nnodes", 8),
        ("--nproc_per_node gpu", None),
        ("--nnodes 2", None),
        ("--nproc_per_node " + "9" * 5000, None),
        ("--nproc_per_node ٣", 3),  # a number to int(), and so to torchrun
    ],
)
def test_launchers_without_a_number(words: str, world_size: int | None) -> None:
    """The environment has the number of processes where the command has no launcher: torchrun sets
    its own, and some platforms set that of nodes."""
    text = f"--seq-length 8 --global-batch-size 4 --data-path /d/a --train-iters 2 {words}"
    settings = read_megatron(text, environment={"WORLD_SIZE": "8"})
    assert settings.world_size == world_size
    assert (settings.seq_length, settings.train_iters) == (8, 2)


def test_files_of_a_command_line_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "words").write_bytes(b"\xff\xfe")
    for name in (tmp_path / "words", tmp_path, "a\0b"):
        with pytest.raises(MegaIndexError, match="cannot be read|regular file|zero byte"):
            read_megatron(f"--seq-length 8 --data-args-path '{name}'", environment={})
    with pytest.raises(InvalidArgument, match="must not hold a zero byte"):
        read_megatron("a\0b", environment={})


SECRET = ("{}://KEY:SECRET@b/x.sh", "{}://b/x.sh?sign=SECRET", "{}:/KEY:SECRET@b/x--y.sh")


@for_each("scheme", ["s3", "gs", "az"])
@for_each("form", [*SECRET, "https://KEY:SECRET@b/x.sh"])
def test_urls_in_place_of_a_file_show_no_secret(scheme: str, form: str) -> None:
    for flag in ("--megatron-args", "--neox-config", "--recipe", "--nanotron-config"):
        status, out, err = cli("plan", flag, form.format(scheme))
        assert (status, out) == (2, "")
        assert err.startswith("megaindex plan: ")
        assert "SECRET" not in err


@for_each(
    "text",
    [
        "a: 2001-02-30",
        "[" * 500,
        "? [1]\n: 2",
        "seq_length: " + "9" * 5000,
        "hostfile: [1]",
        "data_path: [a]",
        "split: {a: b}\ndata_path: x",
        "train_data_paths: [[a]]",
    ],
)
def test_neox_files_that_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "c.yml"
    path.write_text(text)
    with pytest.raises(MegaIndexError):
        resolve(read_neox([path]))


def test_launch_scripts_run_no_command(tmp_path: Path) -> None:
    made = tmp_path / "made"
    script = tmp_path / "train.sh"
    script.write_text(
        f"A=$(touch {made})\nB=`touch {made}`\ntouch {made}\neval 'touch {made}'\n"
        f"cat <(touch {made}) | sh -c 'touch {made}'\n. {tmp_path}/none\n"
        f"python pretrain_gpt.py --seq-length $((8 + 8)) --save ${{A:-$(touch {made})}}\n"
    )
    assert read_megatron(str(script), environment={}).seq_length == 16
    assert not made.exists()


@for_each("read", [lambda path: read_neox([path]), read_recipe, read_nanotron])
@for_each("tag", ["object/apply:os.mkdir", "object/new:os.mkdir", "name:os.mkdir"])
def test_yaml_makes_no_python_object(
    tmp_path: Path, read: Callable[[Path], object], tag: str
) -> None:
    path = tmp_path / "c.yml"
    path.write_text(f"seq_length: !!python/{tag} [{tmp_path / 'made'}]\n")
    with pytest.raises(InvalidArgument, match="is not YAML"):
        read(path)
    assert not (tmp_path / "made").exists()


FLOW, BLOCK = "v{k}: &v{k} {{<<: [{nine}]}}\n", "v{k}: &v{k}\n  <<: [{nine}]\n"


@pytest.mark.parametrize(
    ("read", "line"), [(lambda path: read_neox([path]), FLOW), (read_recipe, BLOCK)]
)
def test_merge_keys_that_multiply(
    tmp_path: Path, read: Callable[[Path], object], line: str
) -> None:
    """Each mapping merges the one before nine times: 9**12 entries in about 600 bytes."""
    text = "v0: &v0 {a: 1}\n"
    for k in range(1, 13):
        text += line.format(k=k, nine=", ".join([f"*v{k - 1}"] * 9))
    (tmp_path / "c.yml").write_text(text)
    with pytest.raises(InvalidArgument, match=r"merge keys"):
        read(tmp_path / "c.yml")


def test_merge_keys_are_read(tmp_path: Path) -> None:
    path = tmp_path / "c.yml"
    path.write_text("<<: [{seed: 3, seq_length: 8}, {seed: 4, train_iters: 5}]\nseq_length: 16\n")
    settings = read_neox([path])
    assert (settings.seed, settings.seq_length, settings.train_iters) == (3, 16, 5)


def test_a_host_file_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_bytes(b"\xff\xfe")
    with pytest.raises(StorageError, match="hostfile"):
        neox_settings({"hostfile": str(tmp_path / "hosts")})


@pytest.mark.parametrize("key", ["seq_length", "data_path", "split", "pack_impl", "seed"])
def test_values_that_aliases_nest_are_never_written_out(tmp_path: Path, key: str) -> None:
    """a: [x, x], b: [*a, *a], … is 2^40 elements in 40 lines."""
    lines = ["v0: &v0 [x, x]"]
    lines += [f"v{k + 1}: &v{k + 1} [*v{k}, *v{k}]" for k in range(40)]
    path = tmp_path / "c.yml"
    path.write_text("\n".join([*lines, f"{key}: *v40", "train_batch_size: 1"]))
    with pytest.raises(InvalidArgument):
        resolve(read_neox([path]))
