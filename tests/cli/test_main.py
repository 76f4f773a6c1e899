"""The command's first word, suggestions, completion, and the JSON of verbs that write."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.command_line import cli
from support.corpora import write_corpus
from support.inputs import for_each

import megaindex
from megaindex import cli as commands
from megaindex.cli import VERBS, main
from megaindex.cli.options import Parser
from megaindex.errors import InvalidArgument


def test_short_and_long_words_for_version_and_help() -> None:
    assert cli("-V") == cli("--version")
    assert cli("-V")[1].startswith(f"megaindex {megaindex.__version__}\nbackend: ")
    assert cli("help") == cli("--help") == cli("-h") == cli()
    for verb in VERBS:
        found = cli("help", verb)
        assert found == cli(verb, "--help")
        assert found[0] == 0
        assert found[1].startswith(f"usage: megaindex {verb} ")


@for_each(
    ("words", "said"),
    [
        (["plam"], "megaindex: unknown verb 'plam'; did you mean plan?"),
        (["help", "tokenise"], "megaindex: unknown verb 'tokenise'; did you mean tokenize?"),
        (["--verison"], "megaindex: unknown option '--verison'; did you mean --version?"),
        (["xyzzy"], f"megaindex: unknown verb 'xyzzy'; it must be one of {', '.join(VERBS)}"),
        (["plan", "--sequence-length", "8"], "--sequence-length: did you mean --seq-length?"),
        (["merge", "o", "a", "--overwritten=1"], "--overwritten: did you mean --overwrite?"),
        (["merge", "o", "a", "--dtype", "foo"], "--dtype must be a NumPy dtype such as int32, got"),
        (["merge", "o", "a", "--dtype", "uint64"], "--dtype uint64 has no code in the megatron d"),
        (["verify", "--dtype", "foo", "a"], "--dtype must be a NumPy dtype"),
        (["tokenize", "o", "a", "--tokenizr", "b"], "--tokenizr: did you mean --tokenizer?"),
        (["import", "numpy", "a", "o", "--seperator", "3"], "--seperator: did you mean --separ"),
        (
            ["split", "a", "o", "--parts", "2", "--overwrit", "--jason"],
            "--jason: did you mean --js",
        ),
    ],
)
def test_a_close_word_is_suggested(words: list[str], said: str) -> None:
    status, out, err = cli(*words)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert said in err


@for_each(
    ("words", "said"),
    [
        (["plan", "--tail", ""], "--tail is empty; give a value, or leave it out"),
        (["audit", "--consumed-samples="], "--consumed-samples is empty"),
        (["build", "--recipe", ""], "--recipe is empty"),
        (["verify", ""], "PATH is empty; give a value, or leave it out"),
        (["plan", "--neox-config", "a.yml", ""], "value 2 of --neox-config is empty; give a value"),
        (["inspect", "p", ""], "value 2 of PATH is empty"),
        (["lock", "", "p"], "value 1 of RUN is empty"),
        (["merge", "", "p"], "OUT is empty"),
        (["merge", "p", ""], "IN is empty"),
        (["import", "numpy", "", "p", "--separator", "3"], "IN is empty"),
        (["split", "--at=", "p", "q"], "--at is empty"),
        (["split", "p", "--parts", "2", "q", ""], "value 2 of OUT is empty"),
        (["audit", "--document", "9" * 20], "--document must be below 2**63, got 9999"),
        (["plan", "--epochs", "1e999"], "--epochs must be a positive number below 2**63 such as"),
        (["merge", "p", "q", "--dtype", "5 6"], "--dtype must be a NumPy dtype such as int32"),
        (["verify", "p", "--dtype", "1_000"], "--dtype must be a NumPy dtype such as int32, got "),
    ],
)
def test_values_without_a_meaning_are_refused(words: list[str], said: str) -> None:
    status, out, err = cli(*words)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"megaindex {words[0]}: {said}")


def test_the_largest_number_of_a_flag() -> None:
    for number, refused in ((2**63 - 1, False), (2**63, True)):
        err = cli("audit", "--document", number)[2]
        assert ("--document must be below 2**63" in err) == refused


@for_each(
    "verb",
    ["audit", "capture", "diff-order", "export", "lock", "plan", "prove", "report", "schema",
     "trace"],
)  # fmt: skip
def test_a_part_of_a_flag_is_no_flag_where_a_script_may_be_given(verb: str) -> None:
    status, out, err = cli(verb, "--hel")
    assert (status, out) == (2, "")
    assert "--hel: did you mean --help?" in err


def test_known_and_distant_flags_are_not_suggested() -> None:
    err = cli("plan", "--seq-length", "8", "--xyzzy", "--megatron-args", "--seed 3")[2]
    assert "unrecognized arguments: --xyzzy; --help" in err
    assert "did you mean" not in cli("merge", "out", "--over")[2]  # an abbreviation


@pytest.mark.slow
@for_each(
    ("line", "offered"),
    [
        ("megaindex sp", {"split"}),
        ("megaindex help di", {"diff-order"}),
        ("megaindex plan --se", {"--seq-length", "--seed", "--separate-final-epoch"}),
        ("megaindex build --subset ", {"train", "valid", "test"}),
        ("megaindex import numpy --se", {"--separator"}),
        ("megaindex split web --par", {"--parts"}),
    ],
)
def test_completion(line: str, offered: set[str], tmp_path: Path) -> None:
    pytest.importorskip("argcomplete")
    found = tmp_path / "found"
    environment = {
        "_ARGCOMPLETE": "1", "COMP_LINE": line, "COMP_POINT": str(len(line)), "COMP_TYPE": "9",
        "_ARGCOMPLETE_IFS": "\n", "_ARGCOMPLETE_STDOUT_FILENAME": str(found),
    }  # fmt: skip
    subprocess.run(
        [sys.executable, "-m", "megaindex"], env={**os.environ, **environment}, check=True
    )
    assert {word.strip() for word in found.read_text().split("\n")} == offered


@pytest.mark.parametrize(
    ("line", "verb", "first"),
    [("megaindex plan --se", ["plan"], "2"), ("python -m megaindex split web --pa", ["split"], "4"),
     ("megaindex plan --seq-length --x", ["plan"], "2")],
)  # fmt: skip
def test_the_verb_of_a_line_that_is_completed(
    line: str, verb: list[str], first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    behind = " what follows the cursor"
    position = 1 + line.split().index("megaindex")
    monkeypatch.setenv("_ARGCOMPLETE", str(position))
    monkeypatch.setenv("COMP_LINE", line + behind)
    monkeypatch.setenv("COMP_POINT", str(len(line)))
    assert list(commands._completed_arguments()) == verb
    assert os.environ["_ARGCOMPLETE"] == first


@pytest.mark.parametrize(
    ("line", "program"), [("megaindex sp", "megaindex"), ("megaindex plan --s", "megaindex plan")]
)
def test_the_parser_of_a_line_completes_it(
    line: str, program: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real one ends the process, and opens descriptor 9 to write into."""
    parsers: list[Parser] = []

    def complete(parser: Parser) -> None:
        assert Parser._is_completing  # it parses the line with this parser
        parsers.append(parser)
        sys.exit()

    argcomplete = pytest.importorskip("argcomplete")
    monkeypatch.setattr(argcomplete, "autocomplete", complete)
    monkeypatch.setattr(Parser, "_is_completing", False)
    environment = {"_ARGCOMPLETE": "1", "COMP_LINE": line, "COMP_POINT": str(len(line))}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit):
        main([])
    (parser,) = parsers
    assert parser.prog == program
    choices = {action.dest: action.choices for action in parser._actions}
    if program == "megaindex":
        assert choices["verb"] == (*VERBS, "help")
        assert choices["verb_of_help"] == tuple(VERBS)
        assert "version" in choices
    else:
        assert "seq_length" in choices


def test_memory_that_does_not_suffice_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    def body() -> int:
        raise MemoryError("9 GB for an array")

    assert commands.guarded("build", body) == 2
    assert capsys.readouterr().err == (
        "megaindex build: not enough memory: 9 GB for an array; use smaller settings\n"
    )


def test_an_error_before_the_flags_are_read_has_no_hint(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def body() -> int:
        raise InvalidArgument("a: is wrong")

    monkeypatch.delitem(sys.modules, "megaindex.cli.options")
    assert commands.guarded("build", body) == 2
    assert capsys.readouterr().err == "megaindex build: a: is wrong\n"


def test_the_version_says_why_there_is_no_native_core(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["--version"]) == 0
    assert "no native core" not in capsys.readouterr().out
    monkeypatch.setattr("megaindex.kernels.why_not_native", lambda: "no file\nof this name")
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.endswith("no native core: no file\n  of this name\n")


@pytest.fixture
def prefix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    lengths = np.random.default_rng(0).integers(1, 60, 50)
    return write_corpus(Path("web"), lengths, np.uint16).path_prefix


def json_of(*words: object) -> dict[str, Any]:
    status, out, err = cli(*words, "--json")
    assert (status, err) == (0, "")
    found: dict[str, Any] = json.loads(out)
    return found


PAIR = {"path_prefix", "documents", "tokens", "dtype", "nbytes", "how"}


def test_json_of_merge_split_and_import(prefix: str) -> None:
    dataset = megaindex.IndexedDataset(prefix)
    np.arange(40, dtype=np.uint16).tofile("tokens.raw")
    raw = ("tokens.raw", "made", "--stored-dtype", "uint16", "--separator", 9)
    for words, count, documents in (
        (("merge", "both", prefix, prefix), 1, 100),
        (("split", prefix, "part-{}", "--parts", 3), 3, 50),
        (("import", "numpy", *raw), 1, 2),
    ):
        found = json_of(*words)
        assert set(found) == {"pairs", "seconds", "bytes_per_second"}
        assert len(found["pairs"]) == count
        assert all(set(pair) == PAIR for pair in found["pairs"])
        assert sum(pair["documents"] for pair in found["pairs"]) == documents
        assert found["seconds"] > 0
        nbytes = sum(pair["nbytes"] for pair in found["pairs"])
        assert found["bytes_per_second"] == pytest.approx(nbytes / found["seconds"])
        for pair in found["pairs"]:
            assert megaindex.IndexedDataset(pair["path_prefix"]).num_tokens == pair["tokens"]
    assert found["pairs"][0]["how"] == "hard link"
    assert dataset.num_tokens == sum(
        megaindex.IndexedDataset(f"part-{k}").num_tokens for k in range(3)
    )


def test_json_of_build(prefix: str) -> None:
    write_corpus(Path("code"), [300, 50], np.uint16)
    words = ("build", "--seq-length", 8, "--cache-dir", "cache", "--data-path")
    one, two = json_of(*words, prefix), json_of(*words, "code", prefix, "--workers", 1)
    keys = {"order", "sequence_length", "num_samples", "tokens_per_epoch", "cache_dir", "backend",
            "engine", "workers", "seconds", "datasets"}  # fmt: skip
    assert set(one) == set(two) == keys
    assert [row["path"] for row in two["datasets"]] == ["code", prefix]
    assert two["datasets"][1] | {"seconds": 0} == one["datasets"][0] | {"seconds": 0}
    for found in (one, two):
        for name in ("num_samples", "tokens_per_epoch"):
            assert found[name] == sum(row[name] for row in found["datasets"])
    assert one["datasets"][0]["tokens_per_epoch"] == megaindex.IndexedDataset(prefix).num_tokens
    assert one["cache_dir"] == "cache"
    assert json_of(*words, prefix, "--order", "epoch")["cache_dir"] is None


def test_json_of_build_with_a_recipe(prefix: str) -> None:
    Path("run.yaml").write_text(
        "sequence_length: 8\nbatch: {micro_batch_size: 2, data_parallel_size: 2}\n"
        "sources: {web: web}\nstages: {all: {steps: 9, mix: {web: 1}}}\n"
    )
    found = json_of("build", "--recipe", "run.yaml", "--cache-dir", "cache")
    text = cli("build", "--recipe", "run.yaml", "--cache-dir", "cache")[1]
    for name in ("num_samples", "num_steps", "tokens_per_epoch"):
        assert f"{found[name]:,} " in text
    (source,) = found["sources"]
    assert f"{source['name']}: {source['path']}, content {source['fingerprint']}" in text
    assert (found["sequence_length"], found["cache_dir"]) == (8, "cache")


def test_errors_with_json_stay_on_stderr(prefix: str) -> None:
    for words in (
        ("build", "--data-path", "none", "--seq-length", 8, "--cache-dir", "cache"),
        ("merge", "out", "none"),
        ("split", prefix, "part-{}", "--parts", 0),
        ("import", "numpy", "none.npy", "out", "--separator", 1),
    ):
        status, out, err = cli(*words, "--json")
        assert (status, out) == (2, "")
        assert err.startswith(f"megaindex {words[0]}: ")


def test_a_question_to_the_wrong_verb_names_the_right_one(prefix: str) -> None:
    sized = (prefix, "--seq-length", 8, "--global-batch-size", 2, "--train-iters", 3)
    for words, part in (
        (("plan", *sized, "--html", "x.html"), "`megaindex audit RUN --html FILE` writes the page"),
        (("lock",), "no run is named; give its file or its pairs first"),
        (("lock", "--out", "a.lock"), "no run is named"),
        (("diff-order", f"data_path={prefix},ordre=epoch", f"data_path={prefix}"),
         "unknown setting ordre; did you mean order?"),
        (("diff-order", f"data_path={prefix},xyz=1", f"data_path={prefix}"),
         "unknown setting xyz; use data_path, "),
        (("prove", "run.lock"), "run.lock is one record of two; give the record with the skip"),
    ):  # fmt: skip
        status, out, err = cli(*words)
        assert (status, out) == (2, "")
        assert part in err
        assert len(err.rstrip().splitlines()) <= 2  # a pair in first place is named first
    assert "did you mean --tail" not in cli("plan", *sized, "--html", "x.html")[2]


def test_a_skipped_step_says_so(prefix: str) -> None:
    words = [prefix, "--seq-length", 8, "--global-batch-size", 2, "--train-iters", 4]
    words += ["--split", "1,0,0", "--eval-iters", 0, "--skip-steps", 2, "--out", "skipped.lock"]
    status, _, err = cli("lock", *words)
    assert status == 0, err
    status, out, _ = cli("trace", "skipped.lock", "--step", 2)
    assert status == 0
    assert out.splitlines() == [
        "step 2 is skipped; the samples of moved steps are served behind the end"
    ]
    assert "is skipped" not in cli("trace", "skipped.lock", "--step", 1)[1]
