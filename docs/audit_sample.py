"""The sample page of docs/audit.md, and the pictures of docs for light and dark pages.

``python docs/audit_sample.py`` writes audit-sample.html, which git ignores, audit-exposure.svg,
balance-time.svg and their dark versions.
"""

from __future__ import annotations

import tempfile
from fractions import Fraction
from pathlib import Path

import numpy as np

from megaindex import IndexedDatasetWriter
from megaindex.audit import audit, run_of_settings, write_page
from megaindex.audit.plots import exposure_curve, picture, step_time, variables
from megaindex.loader import CostModel
from megaindex.plan import BatchSchedule, Data, RunSettings, Source, Target
from megaindex.run.run import Run

DOCS = Path(__file__).parent


def make_corpus(prefix: Path, *, documents: int = 20_000) -> None:
    """Write a corpus of lognormal document lengths; its tokens are all 0."""
    lengths = np.random.default_rng(0).lognormal(6, 1, documents)
    with IndexedDatasetWriter(prefix, dtype="uint16") as writer:
        for length in np.minimum(lengths, 50_000).astype(int):
            writer.add_document(np.zeros(length, np.uint16))


def sample_run(prefix: Path) -> RunSettings:
    """Return the run of PaddleNLP issue 9599: 3.3 epochs, 6,400 samples of them past."""
    return RunSettings(
        order="paddlenlp",
        sequence_length=2048,
        data=Data(train=(Source(path=str(prefix)),)),
        batch=BatchSchedule.constant(16),
        micro_batch_size=2,
        data_parallel_size=8,
        target=Target(kind="epochs", value=Fraction("3.3")),
        consumed_samples=6400,
    )


def balanced_run(prefix: Path) -> Run:
    """Return 30 steps of 16 ranks on documents of 2,000 tokens, lognormal with sigma 1.6."""
    length, sigma, mean = 32_768, 1.6, 2000
    drawn = np.random.default_rng(0).lognormal(np.log(mean) - sigma**2 / 2, sigma, 40_000)
    with IndexedDatasetWriter(prefix, dtype="uint16") as writer:
        for tokens in np.maximum(1, drawn).astype(int):
            writer.add_document(np.zeros(tokens, np.uint16))
    return run_of_settings(
        data_path=str(prefix),
        sequence_length=length,
        micro_batch_size=1,
        data_parallel_size=16,
        gradient_accumulation_steps=4,
        train_iters=30,
    )


def write_picture(name: str, plot: str) -> None:
    """Write a plot for light pages, and for dark ones."""
    light = picture(plot)
    (DOCS / f"{name}.svg").write_text(light)
    (DOCS / f"{name}-dark.svg").write_text(dark(light))


def dark(svg: str) -> str:
    """Return the picture in colours for a dark page."""
    return svg.replace(variables(dark=False), variables(dark=True))


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        prefix = Path(folder) / "sample_corpus"
        make_corpus(prefix)
        result = audit(run_of_settings(sample_run(prefix)), points=120)
        stream = balanced_run(Path(folder) / "balanced")
        balanced = audit(stream, cost_model=CostModel.preset("llama3-8b"))
    write_page(result, DOCS / "audit-sample.html")
    write_picture("audit-exposure", exposure_curve(result))
    assert balanced.balance is not None
    write_picture("balance-time", step_time(balanced, balanced.balance))


if __name__ == "__main__":
    main()
