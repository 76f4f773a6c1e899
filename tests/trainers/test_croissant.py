"""Descriptions of locks in Croissant, read by its own package."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.corpora import write_corpus

from megaindex.lock import make_lock
from megaindex.lock.publication import with_about
from megaindex.lock.summaries import croissant

ABOUT = """
title: "Web, and \\"code\\""
licence: CC-BY-4.0
version: 1.0.0
address: https://example.org/data
sources: {web: {url: "https://example.org/web"}, code: {url: "https://example.org/code"}}
"""


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(("sha256", "about"), [(True, ABOUT), (False, ABOUT), (True, "{}")])
def test_the_package_takes_what_is_printed(
    sha256: bool, about: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package: Any = pytest.importorskip(
        "mlcroissant", reason="mlcroissant is not installed (requirements/trainers.txt)"
    )
    monkeypatch.chdir(tmp_path)
    for name in ("web", "code"):
        write_corpus(tmp_path / name, np.full(20, 40), np.uint16)
    (tmp_path / "about.yaml").write_text(about)
    blend = [1, "web", 2, "code"]
    lock = make_lock(
        data_path=blend, sequence_length=16, train_iters=9, global_batch_size=4, sha256=sha256
    )
    found, lacking = croissant(with_about(lock.write("run.lock"), "about.yaml"))
    assert bool(lacking) == (not sha256 or about != ABOUT)
    (tmp_path / "data.json").write_text(json.dumps(found))
    metadata = package.Dataset(jsonld=tmp_path / "data.json").metadata
    assert (metadata.name, len(metadata.distribution)) == (found["name"], 4)
    assert bool(metadata.to_json().get("isLiveDataset")) == bool(lacking)
    assert metadata.ctx.issues.errors == set()

    del found["distribution"][0]["contentUrl"]
    found.pop("isLiveDataset", None)
    for file in found["distribution"]:
        file.pop("sha256", None)
    with pytest.raises(package.ValidationError):  # the package does look
        package.Dataset(jsonld=found)
