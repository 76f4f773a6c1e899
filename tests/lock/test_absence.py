"""Statements that documents are absent, against the spans of every sample."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.command_line import cli
from support.corpora import write_corpus
from support.folders import inside
from support.inputs import for_each

from megaindex import InvalidArgument, OutOfRange, Skip, open_run
from megaindex.verify.absence import absence

IDS = [0, 3, 17, 50, 51, 52, 53, 60, 61, 62, 63, 64, 65, 119]
FLAGS = ["--seq-length", "16", "--global-batch-size", "4", "--train-iters", "60",
         "--eval-iters", "0", "--split", "90,10,0"]  # fmt: skip


@pytest.fixture(autouse=True)
def corpora(tmp_path: Path) -> Iterator[None]:
    rng = np.random.default_rng(4)
    for name in ("web", "code"):
        write_corpus(tmp_path / name, rng.integers(0, 40, 120))
    with inside(tmp_path):
        Path("ids").write_text(" ".join(map(str, IDS)))
        Path("trained.ids").write_text(" ".join(map(str, IDS[:-1])))
        yield


def prove(*words: str) -> tuple[int, str, str]:
    return cli("prove", "run.lock", "--absent", *words)


@for_each("order", ["megatron", "neox", "epoch", "packed", "window"])
def test_exposures_before_the_step(order: str) -> None:
    removal = ["--skip-documents", "trained.ids:web", "--skip-from-step", "30", "--remove-skipped"]
    for more in (removal, []):
        moved = ["--skip-steps", "2-3", "--move-skipped"]
        words = ["2", "web", "1", "code", "--order", order, *FLAGS, *moved, *more]
        assert cli("lock", *words, "--out", "run.lock", "--overwrite")[0] == 0
        run = open_run("run.lock").run
        seen: dict[int, list[int]] = {each: [] for each in IDS}
        for position in range(run.num_samples):
            if not 8 <= position < 16:
                spans = run.index.locate([position])
                length = spans.input_lengths(16)
                if spans.removed is not None:
                    length[spans.removed] = 0
                for source, document, taken in zip(
                    spans.source.tolist(), spans.document.tolist(), length.tolist(), strict=True
                ):
                    if taken and source == 0 and document in seen:
                        seen[document].append(position)
        for step in (29, 30, 58):
            given = ("ids:web", "--from-step", str(step), "--checkpoints", "40,10,0")
            status, out, _ = prove(*given)
            found = json.loads(prove(*given, "--json")[1])
            late = sum(any(p >= 4 * step for p in places) for places in seen.values())
            assert (found["present"], found["holds"]) == (late, not late)
            assert status == int(not found["holds"]) <= (step < 30 or not more)
            assert out.startswith("not absent" if late else "absent")
            assert found["removed"] == (len(IDS) - 1 if more and step >= 30 else 0)
            assert found["outside"] == 1  # document 119 is of the validation part
            rows = [
                [each, places[0] // 4, places[-1] // 4, places[-1]] if places else [each, *[-1] * 3]
                for each, places in seen.items()
            ]
            assert found["documents"] == rows
            firsts = [row[1] for row in rows if row[1] >= 0]
            listed, more_said = out.count("  document "), f"  {len(firsts) - 10} more, see --json"
            assert (listed, more_said in out) == (min(len(firsts), 10), len(firsts) > 10)
            assert found["checkpoints"] == [
                {"step": k, "trained_on": sum(f < k for f in firsts)} for k in (0, 10, 40)
            ]
            for words_said in ("near-duplicate", "weights", "receipts", "evaluation"):
                assert words_said in out


def test_what_is_refused() -> None:
    assert cli("lock", "web", *FLAGS)[0] == 0
    for words, said in (
        (("ids",), "--from-step"), (("ids", "--from-step", "60"), "from 0 to 59, got 60"),
        (("ids", "--from-step", "-1"), "from 0 to 59"),
        (("ids:code", "--from-step", "1"), "--absent: unknown source code"),
        (("none", "--from-step", "1"), "none"),
        (("ids", "--from-step", "1", "--checkpoints", "1,x"), "--checkpoints must be steps"),
        (("ids", "--from-step", "1", "--checkpoints", "61"), "from 0 to 60, got 61"),
        (("ids", "--from-step", "1", "--checkpoints", "9" * 18), f"from 0 to 60, got {'9' * 18}"),
        (("ids", "--from-step", "1", "--checkpoints", "9" * 19), "--checkpoints must be steps"),
        (("ids", "--from-step", "1", "--search", "."), "--absent takes one run and --from-step"),
    ):  # fmt: skip
        status, _, err = prove(*words)
        assert (status, said in err) == (2, True), err
    assert prove("ids", "--from-step", "59", "--checkpoints", "60")[0] < 2
    two = ("run.lock", "run.lock", "--absent", "ids", "--from-step", "1")
    assert "--absent takes one run" in cli("prove", *two)[2]
    assert "need --absent" in cli("prove", "run.lock", "run.lock", "--from-step", "1")[2]
    run = open_run("run.lock").run
    with pytest.raises(InvalidArgument, match="document 120 does not exist"):
        absence(run, [0, 120], from_step=1)
    with pytest.raises(OutOfRange, match="--from-step"):
        absence(run, [0], from_step=60)
    assert absence(run, [119], from_step=0).holds
    assert Skip(documents=[1], remove=True) != Skip(documents=[1])


def test_documents_that_another_source_reads_are_present() -> None:
    """A pair that is given twice, of which one source removes the documents."""
    text = (
        "sequence_length: 16\nbatch: {global_batch_size: 4}\n"
        "sources: {a: {path: web}, b: {path: web, shuffle_name: other}, c: code}\n"
        "stages: {all: {steps: 90, mix: {a: 1, b: 1, c: 1}}}\n"
        "skip:\n- {documents: trained.ids, source: a, from_step: 0, remove: true}\n"
    )
    for more, status in (("", 1), ("- {documents: trained.ids, source: b, remove: true}\n", 0)):
        Path("run.yaml").write_text(text + more)
        found = cli("prove", "run.yaml", "--absent", "trained.ids:a", "--from-step", "0")
        assert found[0] == status, found
        assert found[1].startswith("absent" if status == 0 else "not absent")
