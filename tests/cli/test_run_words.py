"""A run in first place: what it is taken for, and what is refused."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from support.command_line import cli
from support.corpora import write_corpus

from megaindex.errors import InvalidArgument, MegaIndexError, MissingFile, StorageError
from megaindex.settings.run_words import KINDS, kind_of_file, named_run

RECIPE = """
sequence_length: 16
batch: {micro_batch_size: 2, data_parallel_size: 2}
sources: {web: {path: web}, code: {path: code}}
stages: {main: {steps: 9, mix: {web: 3, code: 1}}}
"""
NEOX = """{"seq_length": 16, "train-micro-batch-size-per-gpu": 2, "global_num_gpus": 2,
"train_iters": 9, "data_path": "web", "split": "100,0,0"}"""
SCRIPT = """#!/bin/bash
torchrun --nproc_per_node 2 pretrain_gpt.py --seq-length 16 --micro-batch-size 2 \\
  --global-batch-size 4 --train-iters 9 --data-path 3 web 1 code --split 100,0,0
"""
FILES = {
    "run.yaml": ("recipe", RECIPE),
    "nanotron.yaml": ("nanotron", "data_stages: []\ntokens: {sequence_length: 8}"),
    "foundry.yaml": ("llm-foundry", "train_loader: {}\nmax_seq_len: 8"),
    "maxtext.yml": ("maxtext", "base_config: base.yml\nsteps: 9"),
    "neox.yml": ("neox", NEOX),
    "launch.sh": ("script", SCRIPT),
    "arguments.txt": ("script", "--seq-length 8 --train-iters 9"),
}
TARGET = ["--seq-length", "16", "--global-batch-size", "4", "--train-iters", "9"]
ALONE = ["--workers", 1]  # several pairs are checked in processes, which start slowly


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, size in (("web", 40), ("code", 20), ("1", 10)):
        write_corpus(tmp_path / name, [9 + k % 7 for k in range(size)])
    for name, (_, text) in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_known_by_its_content(folder: Path, name: str) -> None:
    kind, _ = FILES[name]
    assert kind_of_file(name) == kind
    os.rename(name, "other.lock")  # whatever it is called
    found = named_run(["other.lock"])
    assert found.kind == kind
    assert list(found.settings) == [KINDS[kind].setting]


@pytest.mark.parametrize(
    ("words", "settings"),
    [
        (["web"], {"data_path": ["web"]}),
        (["web.bin", "code.idx"], {"data_path": ["web", "code"]}),
        (["3", "web", "1.5", "code"], {"data_path": ["web", "code"], "weights": ["3", "1.5"]}),
        (["1"], {"data_path": ["./1"]}),  # a pair of this name
        (["1", "web"], {"data_path": ["./1", "web"]}),
        (["2", "1"], {"data_path": ["./1"], "weights": ["2"]}),
        (["s3://bucket/web"], {"data_path": ["s3://bucket/web"]}),
        (["neox.yml"], {"neox_config": ["neox.yml"]}),
        (["maxtext.yml", "steps=7"], {"maxtext_config": ["maxtext.yml", "steps=7"]}),
    ],
)
def test_words_are_settings(folder: Path, words: list[str], settings: dict[str, Any]) -> None:
    assert named_run(words).settings == settings


def test_files_of_one_configuration_go_together(folder: Path) -> None:
    Path("rare.yml").write_text("checkpoint_factor: 9")  # by itself of no kind
    assert named_run(["rare.yml", "neox.yml"]).settings == {"neox_config": ["rare.yml", "neox.yml"]}
    with pytest.raises(InvalidArgument, match="rare.yml: is no lock, no recipe"):
        named_run(["rare.yml", "run.yaml"])
    with pytest.raises(InvalidArgument, match="rare.yml: is no lock"):
        named_run(["rare.yml"])
    assert named_run(["rare.yml"], "neox").kind == "neox"


@pytest.mark.parametrize(
    ("words", "error", "said"),
    [
        (["run.yaml", "run.yaml"], InvalidArgument, "a run has one recipe"),
        (["run.yaml", "neox.yml"], InvalidArgument, "run.yaml is a recipe, neox.yml is a GPT-NeoX"),
        (["neox.yml", "web"], InvalidArgument, "describes the whole run, also 'web'"),
        (["run.yaml", "steps=7"], InvalidArgument, "describes the whole run, also 'steps=7'"),
        (["launch.sh", "8"], InvalidArgument, "--script-args 8"),
        (["2", "3", "web"], InvalidArgument, "2 3: two weights in a row"),
        (["web", "3"], InvalidArgument, "3: a weight stands before its pair, and none follows"),
        (["2", "web", "code"], InvalidArgument, "code: has no weight, other pairs have"),
        (["nothing"], MissingFile, "nothing: is no file, and nothing.idx and .bin do not exist"),
        ([""], MissingFile, "is no file"),
        (["x" * 300], MissingFile, "is no file"),
    ],
)
def test_words_that_do_not_belong_together_are_refused(
    folder: Path, words: list[str], error: type[MegaIndexError], said: str
) -> None:
    with pytest.raises(error) as raised:
        named_run(words)
    assert said in str(raised.value)


def test_what_is_not_read_is_refused(folder: Path) -> None:
    os.mkfifo("pipe")
    with pytest.raises(StorageError, match="pipe: is a pipe, not a regular file"):
        named_run(["pipe"])
    os.mkdir("folder")
    with pytest.raises(InvalidArgument, match="folder: is a folder"):
        named_run(["folder"])
    for suffix in (".idx", ".bin"):
        Path("web" + suffix).rename("folder" + suffix)
    assert named_run(["folder"]).settings == {"data_path": ["folder"]}
    for text in ("", " \n# nothing\n"):
        Path("empty.yaml").write_text(text)
        with pytest.raises(InvalidArgument, match=r"empty\.yaml: is empty"):
            named_run(["empty.yaml"])
    Path("prose.txt").write_text("no flags here")
    with pytest.raises(InvalidArgument, match=r"prose\.txt: is no lock"):
        named_run(["prose.txt"])


def test_what_fits_two_wants_a_word(folder: Path) -> None:
    Path("both.yaml").write_text("data_stages: []\ntrain_loader: {}")
    with pytest.raises(InvalidArgument, match="may be a Nanotron .* and an LLM-Foundry .* --as na"):
        named_run(["both.yaml"])
    assert named_run(["both.yaml"], "llm-foundry").kind == "llm-foundry"
    assert str(named_run(["both.yaml"], "lock")) == "both.yaml is taken for a lock"
    Path("web").write_text(RECIPE)  # beside web.idx
    with pytest.raises(InvalidArgument, match=r"web: is a file, and web\.idx a pair"):
        named_run(["web"])
    assert named_run(["web"], "pairs").settings == {"data_path": ["web"]}
    assert named_run(["web"], "recipe").settings == {"recipe": "web"}
    with pytest.raises(InvalidArgument, match="--as must be one of"):
        named_run(["web"], "yaml")


@pytest.mark.parametrize(
    ("words", "flags"),
    [
        (["run.yaml"], ["--recipe", "run.yaml"]),
        (["neox.yml"], ["--neox-config", "neox.yml"]),
        (["launch.sh"], ["--megatron-args", "launch.sh"]),
        (["3", "web", "2", "code", *TARGET], ["--data-path", "3", "web", "2", "code", *TARGET]),
    ],
)
def test_verbs_answer_as_with_the_spelled_flag(
    folder: Path, words: list[str], flags: list[str]
) -> None:
    for verb in (["plan", "--json"], ["audit", "--json"], ["trace", "--json", "--step", "2-3"]):
        status, out, err = cli(*verb[:1], *words, *verb[1:])
        assert (status, err) == (0, f"megaindex {verb[0]}: {named_run(words[:4])}\n")
        assert (status, out) == cli(*verb[:1], *flags, *verb[1:])[:2]
    assert cli("lock", *words, "--out", "a.lock")[0] == 0
    assert cli("lock", *flags, "--out", "b.lock")[0] == 0
    assert Path("a.lock").read_bytes() == Path("b.lock").read_bytes()
    assert kind_of_file("a.lock") == "lock"
    assert cli("plan", "a.lock", "--json")[1] == cli("plan", "--lock", "a.lock", "--json")[1]


def test_a_report_is_that_of_the_lock(folder: Path) -> None:
    assert cli("lock", "run.yaml", "--out", "run.lock")[0] == 0
    of_lock = json.loads(cli("report", "run.lock", "--json")[1])
    assert of_lock.pop("lock") == json.loads(Path("run.lock").read_text())["digest"]
    of_recipe = json.loads(cli("report", "run.yaml", "--json")[1])
    assert of_recipe.pop("lock") is None
    assert of_recipe == of_lock
    assert "digest of the lock" in cli("report", "--lock", "run.lock")[1]
    assert "digest of the lock" not in cli("report", "run.yaml")[1]
    assert "--lock has the whole run" in cli("report", "run.lock", "--seed", "3")[2]


def test_verify_checks_the_pairs_of_a_configuration(folder: Path) -> None:
    status, out, err = cli("verify", "launch.sh", "neox.yml", *ALONE)
    assert status == 0
    assert err.splitlines() == [
        "megaindex verify: launch.sh is a launch script of Megatron-LM of 2 pairs",
        "megaindex verify: neox.yml is a GPT-NeoX configuration of 1 pair",
    ]
    assert [line.partition(":")[0] for line in out.splitlines()] == ["web", "code", "web"]
    Path("code.bin").write_bytes(b"")
    assert cli("verify", "launch.sh", *ALONE)[0] == 1
    assert cli("verify", "neox.yml")[0] == 0


def test_orders_of_all_kinds_of_runs_are_compared(folder: Path) -> None:
    assert cli("lock", "run.yaml", "--out", "run.lock")[0] == 0
    status, out, _ = cli("diff-order", "run.yaml", "run.lock", "--json")
    found = json.loads(out)
    assert (status, found["relation"], found["a"], found["b"]) == (
        0, "equal", "run.yaml", "run.lock",
    )  # fmt: skip
    assert found["identities"][0] == found["identities"][1]
    assert cli("diff-order", "run.yaml", "launch.sh")[0] == 1
    Path("side.yaml").write_text("data_path: web\nseq_length: 16\norder: neox\nsplit: 1,0,0")
    other = ["order=neox,split=1,0,0", "--data-path", "web", "--seq-length", "16", "--epochs", "1"]
    status, out, err = cli("diff-order", "side.yaml", *other, "--json")
    assert (status, err) == (0, "")  # settings, although these are keys of GPT-NeoX too
    assert json.loads(out)["relation"] == "equal"


def test_a_lock_is_alone(folder: Path) -> None:
    assert cli("lock", "run.yaml", "--out", "run.lock")[0] == 0
    assert "run.lock is a lock: --public" in cli("lock", "run.lock")[2]
    for flags in (["--seed", "3"], ["--data-path", "web"], ["--skip-steps", "3"]):
        for verb in ("plan", "audit"):
            status, out, err = cli(verb, "run.lock", *flags)
            assert (status, out) == (2, "")
            assert f"--lock has the whole run, also {flags[0]}" in err
    err = cli("plan", "run.yaml", "--recipe", "run.yaml")[2]
    assert "run.yaml is a recipe, also given by --recipe; give one of them" in err
    assert "--as recipe says what RUN is" in cli("plan", "--as", "recipe")[2]


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["plan", "--recipe", "neox.yml"], "neox.yml is a GPT-NeoX configuration, which --neox-"),
        (["plan", "--neox-config", "launch.sh"], "a launch script of Megatron-LM, which --megatro"),
        (["plan", "--lock", "run.yaml"], "run.yaml is a recipe, which --recipe takes"),
        (["prove", "run.yaml", "run.yaml"], "run.yaml is a recipe"),
    ],
)
def test_a_file_in_the_wrong_place_is_named(folder: Path, words: list[str], hint: str) -> None:
    status, out, err = cli(*words)
    found = err or json.dumps(out)
    assert status != 0
    assert hint in found


def test_flags_that_have_no_effect_are_refused(folder: Path) -> None:
    assert cli("lock", "run.yaml", "--out", "run.lock")[0] == 0
    refused = {
        ("plan", "run.yaml", "--seed", "0"): "--recipe describes the whole run, so does --seed",
        ("plan", "run.lock", "--eval-iters", "0"): "--lock has the whole run, also --eval-iters",
        ("plan", "run.yaml", "--script-args", "a"): "so does --script-args",
        ("report", "run.yaml", "--search", "."): "--search is for moved pairs of a lock",
        ("verify", "run.lock", "--step", "1", "--vocab-size", "9"): "--vocab-size is no check of",
        ("verify", "run.lock", "--step", "1", "--inputs"): "--inputs is no check of a lock",
        ("diff-order", "run.yaml", "run.lock", "--seed", "7"): "--seed is for sides of settings",
        ("verify", "run.lock", "--full", "--vocab-size", "9"): "vocab_size is no check of a lock",
        ("verify", "web", "run.lock", "--full", "--eod", "9"): "run.lock: eod is no check of a lo",
        ("verify", "run.lock", "--inputs"): "inputs is no check of a lock",
        ("verify", "run.lock", "--subset", "test"): "--subset is of --step; give the steps",
        ("plan", "run.yaml", "--skip", ""): "--skip is empty; give a value",
        ("plan", "run.yaml", "--as", ""): "--as is empty; give a value",
        ("prove", "run.lock", "run.lock", "--search", "none"): "none: is not a folder",
    }
    for words, said in refused.items():
        status, out, err = cli(*words)
        assert (status, out) == (2, ""), words
        assert said in err


def test_skips_that_are_given_twice_are_both_taken(folder: Path) -> None:
    for name, ids in (("a.txt", "1"), ("b.txt", "2 3")):
        Path(name).write_text(ids)
    words = ["web", *TARGET, "--order", "epoch"]
    once = ["--skip-steps", "3", "5", "--skip-documents", "a.txt", "b.txt"]
    twice = ["--skip-steps", "3", "--skip-documents", "a.txt", "--skip-documents", "b.txt",
             "--skip-steps", "5"]  # fmt: skip
    for name, skips in (("once.lock", once), ("twice.lock", twice)):
        assert cli("lock", *words, *skips, "--out", name)[0] == 0
    first, second = (json.loads(Path(f"{name}.lock").read_text()) for name in ("once", "twice"))
    assert first["subsets"] == second["subsets"]
    assert first["subsets"]["train"]["index"]["left_out"] == [[12, 16], [20, 24]]
    assert len(first["subsets"]["train"]["index"]["masks"]) == 2


OUTPUTS = {
    "lock": ["lock", "run.yaml", "--out", "NAME"],
    "lengths": ["lock", "run.yaml", "--out", "new.lock", "--lengths", "NAME"],
    "scaled": ["plan", "run.yaml", "--scale", "1/2", "--out", "NAME"],
    "captured": ["capture", "--out", "NAME", "--", "bash", "launch.sh"],
}
ENDINGS = {"lock": "lock", "lengths": "lengths", "scaled": "yaml", "captured": "json"}


@pytest.mark.parametrize("kind", OUTPUTS)
def test_overwrite_replaces_no_file_of_another_kind(folder: Path, kind: str) -> None:
    """Such as the corpus or the script that the command reads."""
    for name in ("web.bin", "web.idx", "launch.sh"):
        before = Path(name).read_bytes()
        verb, *words = (word.replace("NAME", name) for word in OUTPUTS[kind])
        status, _, err = cli(verb, "--overwrite", *words)
        assert status == 2
        assert f"must end in .{ENDINGS[kind]}" in err
        assert Path(name).read_bytes() == before
    assert not Path("new.lock").exists()


@pytest.mark.parametrize("kind", OUTPUTS)
def test_outputs_are_refused_before_the_work(folder: Path, kind: str) -> None:
    """An output that cannot be written leaves nothing of another output behind."""
    name = f"none/out.{ENDINGS[kind]}"
    status, _, err = cli(*(word.replace("NAME", name) for word in OUTPUTS[kind]))
    assert status == 2
    assert f"{name}: the folder none does not exist; make it first" in err
    status, _, err = cli("lock", "run.yaml", "--lengths", "run.lengths", "--out", "none/run.lock")
    assert (status, os.path.exists("run.lengths")) == (2, False)
    status, _, err = cli(*(word.replace("NAME", f"s3://b/{name}") for word in OUTPUTS[kind]))
    assert status == 2
    assert "lies in an object store; write it to a disk and upload it" in err
    name = f"out.{ENDINGS[kind]}"
    Path(name).write_text("mine")
    status, _, err = cli(*(word.replace("NAME", name) for word in OUTPUTS[kind]))
    assert (status, Path(name).read_text()) == (2, "mine")
    assert "already exists" in err


@pytest.mark.parametrize("text", ["", "[]", "a: 1\n"])
def test_files_of_no_known_kind_are_refused(folder: Path, text: str) -> None:
    Path("notes.txt").write_text(text)
    for verb, said in (
        ("inspect", "must be an .idx, a .bin, a recipe (.yaml), a lock (.lock) or"),
        ("verify", "is empty" if not text else "must be an .idx, a .bin, a "),
    ):
        status, out, err = cli(verb, "notes.txt")
        assert (status, out) == (2, "")
        assert f"notes.txt: {said}" in err


def test_verify_knows_files_by_their_content(folder: Path) -> None:
    assert cli("lock", "run.yaml", "--out", "run.lock")[0] == 0
    for old, new, said in (
        ("run.lock", "other.json", "lock, 2 pairs"),
        ("run.yaml", "recipe.txt", "recipe, "),
        ("neox.yml", "neox.lock", "web: pair, "),
    ):
        os.rename(old, new)
        status, out, _ = cli("verify", new, *(ALONE if new == "recipe.txt" else ()))
        assert (status, said in out) == (0, True), out


def test_what_is_no_script_is_not_taken_for_one(folder: Path) -> None:
    for text in ("use --help for help", "#!/usr/bin/env python3\nprint('--verbose')"):
        Path("text").write_text(text)
        with pytest.raises(InvalidArgument, match="text: is no lock"):
            named_run(["text"])
    Path("text").write_text("#!/bin/bash\n# a\ntorchrun a.py --data-path web --name 'a: b'\n")
    assert named_run(["text"]).kind == "script"  # although it is YAML too
    Path("broken.yaml").write_text(RECIPE.replace("sources:", "sources: [") + "\n\tx: 1")
    with pytest.raises(InvalidArgument, match=r"is no lock.*; as YAML: .*line [0-9]+"):
        named_run(["broken.yaml"])


def test_the_right_place_gives_no_hint(folder: Path) -> None:
    Path("broken.yaml").write_text(RECIPE.replace("steps: 9", "steps: none"))
    for words in (["broken.yaml"], ["--recipe", "broken.yaml"]):
        status, _, err = cli("plan", *words)
        assert status == 2
        assert "which --recipe takes" not in err
    assert cli("lock", "run.yaml", "--out", "run.lock")[0] == 0
    for word in (["lock", "run.yaml", "--out", "run.lock"], ["verify", "run.lock", "--step", "99"]):
        status, _, err = cli(*word)
        assert (status, "takes" in err) == (2, False), err


def test_steps_are_ranges_and_sources_have_names(folder: Path) -> None:
    assert cli("lock", "run.yaml", "--out", "run.lock")[0] == 0
    spans = [json.loads(cli("trace", "run.lock", "--step", str(k), "--json")[1])["spans"]
             for k in range(2, 5)]  # fmt: skip
    whole = json.loads(cli("trace", "run.lock", "--step", "2-4", "--json")[1])
    assert whole == {"step": "2-4", "spans": [each for step in spans for each in step]}
    assert cli("trace", "run.lock", "--step", "0-8")[0] == 0
    assert "step must be from 0 to 8, got 9" in cli("trace", "run.lock", "--step", "0-9")[2]
    for text in ("4-2", "x", "-1", "1-", "1-2-3"):
        assert (
            f"--step must be a step, or steps as 41190-41199, got '{text}'"
            in (cli("trace", "run.lock", f"--step={text}")[2])
        )
    found = cli("verify", "run.lock", "--step", "2-8")[1]
    assert "the positions of steps 2 to 8, the receipt of steps 0 to 8: no findings" in found
    assert "step must be from 0 to 8" in cli("verify", "run.lock", "--step", "2-9")[2]
    by_name = cli("audit", "run.lock", "--document", "3", "--source", "code")
    assert by_name[0] == 0
    assert by_name[1] == cli("audit", "run.lock", "--document", "3", "--source", "1")[1]
    assert (
        "--source: documents need their source, one of web, code; give it"
        in (cli("audit", "run.lock", "--document", "3")[2])
    )
    assert (
        "--source: unknown source math; the sources are web, code"
        in (cli("audit", "run.lock", "--document", "3", "--source", "math")[2])
    )


def test_help_is_short_and_help_all_whole() -> None:
    short, whole = (cli("plan", flag)[1] for flag in ("--help", "--help-all"))
    flags = [line.split()[0] for line in short.splitlines() if line.startswith("  --")]
    assert len(flags) <= 20
    for flag in ("--seq-length", "--epochs", "--tail", "--coverage", "--json", "--check"):
        assert flag in flags
    for flag in ("--rampup-batch-size", "--recipe", "--lock", "--cost-model", "--mix-bounds"):
        assert flag not in short
        assert flag in whole
    assert "--step" in cli("trace", "--help")[1]
    assert "--epochs" not in cli("trace", "--help")[1]
    assert "--epochs" in cli("trace", "--help-all")[1]


def test_the_first_list_has_the_tasks() -> None:
    first = cli("help")[1]
    for task in ("before a run", "during a run", "after a run", "corpora"):
        assert f"\n{task}\n" in first
    more = cli("help", "more")[1]
    assert "diff-order  report" in more
    assert "diff-order  report" not in first
