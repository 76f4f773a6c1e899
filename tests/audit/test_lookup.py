"""Step and rank to documents, and back."""

from __future__ import annotations

import json
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from support.command_line import cli
from support.corpora import write_corpus
from support.inputs import for_each

from megaindex import InvalidArgument, OutOfRange
from megaindex.audit.render import print_servings
from megaindex.audit.trace import documents_of, steps_of
from megaindex.loader.samplers import MicroBatchSampler
from megaindex.run.from_settings import run_of_settings
from megaindex.run.run import Run
from megaindex.settings.run_builder import resolve
from megaindex.settings.settings import Settings


@pytest.fixture(scope="module")
def stream(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two sources, 3 ranks, micro batches of 2, 2 of them a step; a third of it consumed."""
    folder = tmp_path_factory.mktemp("lookup")
    rng = np.random.default_rng(8)
    for name in "ab":
        write_corpus(folder / name, rng.integers(1, 60, 50))
    settings = Settings(
        order="neox",
        data_path=("0.7", str(folder / "a"), "0.3", str(folder / "b")),
        split="9,1,0",
        seq_length=16,
        micro_batch_size=2,
        data_parallel_size=3,
        gradient_accumulation_steps=2,
        train_samples="120",
        consumed_samples="36",
    )
    return run_of_settings(resolve(settings))


def test_ranks_read_what_the_sampler_gives_them(stream: Run) -> None:
    for rank in range(3):
        sampler = MicroBatchSampler(
            num_samples=stream.num_samples,
            micro_batch_size=2,
            data_parallel_rank=rank,
            data_parallel_size=3,
        )
        batches = list(sampler)
        for step in range(stream.num_steps):
            found = documents_of(stream, step, rank)
            for number in range(2):
                samples = [s.sample for s in found if s.micro_batch == number]
                assert list(dict.fromkeys(samples)) == batches[2 * step + number]


@for_each("samples", range(97, 109))
def test_a_padded_last_step_is_spread_as_the_sampler_does(prefix: Path, samples: int) -> None:
    settings = Settings(
        order="epoch", data_path=(str(prefix),), seq_length=16, micro_batch_size=2,
        data_parallel_size=3, gradient_accumulation_steps=2, train_samples=str(samples), tail="pad",
    )  # fmt: skip
    stream = run_of_settings(resolve(settings))
    assert stream.masked_rows == -samples % 12
    for rank in range(3):
        sampler = MicroBatchSampler(
            num_samples=samples, micro_batch_size=2, data_parallel_rank=rank, data_parallel_size=3,
            global_batch_size=12, tail="pad",
        )  # fmt: skip
        batches = list(sampler)
        for step in range(stream.num_steps):
            found = documents_of(stream, step, rank)
            for number in range(2):
                served = list(dict.fromkeys(s.sample for s in found if s.micro_batch == number))
                assert served == [i for i in batches[2 * step + number] if i is not None]


def test_a_step_serves_its_samples_whole(stream: Run) -> None:
    served = documents_of(stream, 4)
    assert sum(s.length for s in served) == 12 * 16
    assert {s.rank for s in served} == {0, 1, 2}
    assert {s.step for s in served} == {4}
    spans = stream.index.locate(np.arange(48, 60))
    assert {(s.source, s.document) for s in served} <= set(
        zip(spans.source.tolist(), spans.document.tolist(), strict=True)
    )


def test_documents_lead_back_to_their_steps(stream: Run) -> None:
    every = [s for step in range(stream.num_steps) for s in documents_of(stream, step)]
    for source, audited in enumerate(stream.sources):
        for document in range(audited.lengths.size):
            expected = [s for s in every if (s.source, s.document) == (source, document)]
            assert steps_of(stream, document, source) == expected


def test_what_does_not_exist_is_refused(stream: Run, prefix: Path) -> None:
    with pytest.raises(OutOfRange, match="step must be from 0 to 9"):
        documents_of(stream, 10)
    with pytest.raises(OutOfRange, match="rank must be from 0 to 2"):
        documents_of(stream, 0, 3)
    with pytest.raises(OutOfRange, match="source must be from 0 to 1"):
        steps_of(stream, 0, 2)
    with pytest.raises(OutOfRange, match="audited documents are 0 to 44"):
        steps_of(stream, 45)
    plain = Settings(data_path=(str(prefix),), seq_length=16, global_batch_size=4, epochs="1")
    unranked = run_of_settings(resolve(plain))
    assert documents_of(unranked, 0)[0].rank is None
    with pytest.raises(InvalidArgument, match="needs micro batch size and data-parallel size"):
        documents_of(unranked, 0, 0)


def test_the_command_line(prefix: Path) -> None:
    run = ["--data-path", prefix, "--seq-length", 16, "--epochs", 2]
    run += ["--micro-batch-size", 2, "--data-parallel-size", 2]
    status, out, err = cli("audit", *run, "--step", 3, "--rank", 1, "--json")
    assert (status, err) == (0, "")
    servings = json.loads(out)["servings"]
    assert {s["sample"] for s in servings} == {14, 15}
    document = servings[0]["document"]
    status, out, _ = cli("audit", *run, "--document", document, "--json")
    assert status == 0
    assert servings[0] in json.loads(out)["servings"]
    status, out, _ = cli("audit", *run, "--document", document)
    assert f" {document} " in out
    status, out, _ = cli("audit", *run, "--document", 0)  # an empty one
    assert "not served in any step of this run" in out


def test_at_most_two_hundred_servings_are_printed(stream: Run) -> None:
    (serving, *_) = documents_of(stream, 0)
    for count in (200, 201):
        with redirect_stdout(StringIO()) as out:
            print_servings(stream, [serving] * count)
        assert ("1 more; --json lists all" in out.getvalue()) == (count == 201)


@for_each(
    ("words", "message"),
    [
        (["--step", 1, "--document", 1], "--step and --document exclude each other"),
        (["--rank", 1], "--rank needs --step"),
        (["--source", 1], "--source needs --document"),
        (["--step", 1, "--html", "x"], "--html shows the audit"),
        (["--points", 0], "--points must be at least 1"),
        (["--step", 10**6], "step must be from 0"),
        (["--consumed-samples", "10M"], "consumed-samples"),
    ],
)
def test_bad_input_ends_in_one_line(prefix: Path, words: list[object], message: str) -> None:
    run = ["--data-path", prefix, "--seq-length", 16, "--epochs", 1, "--global-batch-size", 4]
    status, out, err = cli("audit", *run, *words)
    assert (status, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1
