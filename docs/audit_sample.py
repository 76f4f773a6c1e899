"""The sample page of docs/audit.md, and its picture for light and dark pages.

``python docs/audit_sample.py`` writes audit-sample.html, which git ignores, audit-exposure.svg and
audit-exposure-dark.svg.
"""

from __future__ import annotations

import tempfile
from fractions import Fraction
from pathlib import Path

import numpy as np

from megaindex import IndexedDatasetWriter
from megaindex.audit import audit, stream_of_run, write_page
from megaindex.audit.plots import exposure_curve, picture, variables
from megaindex.plan import BatchSchedule, Data, Run, Source, Target

DOCS = Path(__file__).parent


def make_corpus(prefix: Path, *, documents: int = 20_000) -> None:
    """Write a corpus of lognormal document lengths; its tokens are all 0."""
    lengths = np.random.default_rng(0).lognormal(6, 1, documents)
    with IndexedDatasetWriter(prefix, dtype="uint16") as writer:
        for length in np.minimum(lengths, 50_000).astype(int):
            writer.add_document(np.zeros(length, np.uint16))


def sample_run(prefix: Path) -> Run:
    """Return the run of PaddleNLP issue 9599: 3.3 epochs, 6,400 samples of them past."""
    return Run(
        order="paddlenlp",
        sequence_length=2048,
        data=Data(train=(Source(path=str(prefix)),)),
        batch=BatchSchedule.constant(16),
        micro_batch_size=2,
        data_parallel_size=8,
        target=Target(kind="epochs", value=Fraction("3.3")),
        consumed_samples=6400,
    )


def dark(svg: str) -> str:
    """Return the picture in colours for a dark page."""
    return svg.replace(variables(dark=False), variables(dark=True))


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        prefix = Path(folder) / "sample_corpus"
        make_corpus(prefix)
        result = audit(stream_of_run(sample_run(prefix)), points=120)
    write_page(result, DOCS / "audit-sample.html")
    light = picture(exposure_curve(result))
    (DOCS / "audit-exposure.svg").write_text(light)
    (DOCS / "audit-exposure-dark.svg").write_text(dark(light))


if __name__ == "__main__":
    main()
