"""The page holds all it shows, in one file."""

from __future__ import annotations

import itertools
import json
import os
import re
import runpy
import socket
import stat
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from support.command_line import cli
from support.corpora import write_corpus
from support.folders import inside
from support.inputs import for_each

import megaindex
from megaindex.audit import Audit, audit, plots, run_of_settings
from megaindex.audit.render import worst_sources
from megaindex.audit.report import (
    SourceCounts,
    distance_text,
    findings,
    source_counts,
    suggestions,
    times_seen,
)
from megaindex.settings.run_builder import resolve
from megaindex.settings.settings import Settings


@pytest.fixture(autouse=True, scope="module")
def date() -> Iterator[None]:
    """Pages of equal audits are equal at a given date."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SOURCE_DATE_EPOCH", "1800000000")
        yield


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("page")
    for name, size in (("web", 300), ("books", 40)):
        write_corpus(folder / name, np.random.default_rng(size).integers(1, 90, size))
    run = ["--data-path", 0.8, folder / "web", 0.2, folder / "books", "--seq-length", 16]
    run += ["--global-batch-size", 8, "--train-iters", 150, "--consumed-samples", 400]
    out = folder / "audit.html"
    status, _, err = cli("audit", *run, "--order", "neox", "--html", out)
    assert status == 0, err
    assert not list(folder.glob(".*"))
    return out.read_text(encoding="utf-8")


def test_nothing_is_fetched(page: str) -> None:
    addresses = set(re.findall(r"(?:https?:)?//[^\s\"'<>]+", page))
    assert addresses <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    assert not re.search(r"<(script|link|img|iframe|image)\b|@import|url\((?!#)", page)


def test_every_picture_is_well_formed_and_explained(page: str) -> None:
    pictures = re.findall(
        r"<figure>\n(?:<ul.*?</ul>\n)?(<svg(?:(?!<figure).)*</svg>)\n<figcaption>", page, re.DOTALL
    )
    captions = re.findall(r"<figcaption>(.*?)</figcaption>", page, re.DOTALL)
    assert len(pictures) == len(captions) == 5
    for picture, caption in zip(pictures, captions, strict=True):
        assert ElementTree.fromstring(picture).get("role") == "img"
        assert len(caption) > 80
    identifiers = re.findall(r'\bid="([^"]+)"', page)
    assert len(identifiers) == len(set(identifiers))
    for reference in re.findall(r'(?:url\(|href=")#([^)"]+)', page):
        assert reference in identifiers


def test_ticks_of_steps_are_round_and_evenly_placed(page: str) -> None:
    plots = [text for text in re.findall(r"<svg.*?</svg>", page, re.DOTALL) if ">step<" in text]
    assert len(plots) > 2
    for plot in plots:
        ticks = re.findall(r'<text x="([\d.]+)%" y="\d+" text-anchor="middle">([\d,]+)<', plot)
        assert [value for _, value in ticks] == ["0", "50", "100", "150"]  # of 200
        np.testing.assert_allclose(np.diff([float(place) for place, _ in ticks], n=2), 0, atol=0.01)


def test_lines_of_values_lie_between_the_axes(page: str) -> None:
    plots = [text for text in page.split("<figcaption>") if ">step<" in text]
    for plot in plots:
        inner = re.search(r'<svg x="[\d.]+%" y="(\d+)" width="[\d.]+%" height="(\d+)"', plot)
        assert inner is not None
        top, height = int(inner[1]), int(inner[2])
        lines = [float(y) for y in re.findall(r'class="grid" x1=.*? y1="([\d.]+)"', plot)]
        assert max(lines) == lines[0] == top + height  # of 0
        assert min(lines) == lines[-1] >= top


def test_the_past_is_marked_at_the_step_where_it_ends(page: str) -> None:
    plots = [text for text in page.split("<figcaption>") if ">step<" in text]
    assert len(plots) > 2
    for plot in plots:
        end = re.search(r'<text x="([\d.]+)%" [^>]*>50<', plot)
        past = re.search(r'<rect class="past" x="([\d.]+)%" y="\d+" width="([\d.]+)%"', plot)
        line = re.search(r'<line class="now" x1="([\d.]+)%" x2="([\d.]+)%"', plot)
        word = re.search(r'<text class="now" x="([\d.]+)%" [^>]*>now<', plot)
        assert end is not None
        assert past is not None
        assert line is not None
        assert word is not None
        assert float(past[1]) + float(past[2]) == pytest.approx(float(end[1]), abs=0.01)
        assert {line[1], line[2], word[1]} == {end[1]}


def test_the_numbers_are_on_it(page: str) -> None:
    assert "of which 50 are past" in page
    for words in ("earlier exposures", "web", "books", "so far", "after all steps", "@media print"):
        assert words in page


def test_the_page_says_which_run_it_shows(page: str) -> None:
    shown = dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", page))
    words = re.sub("<.*?>", "", shown.pop("command"))
    assert words.startswith("megaindex audit --data-path 0.8 ")
    assert shown.pop("sources").endswith("/*: web, books")
    assert shown == {
        "order": "neox",
        "framework": "GPT-NeoX (main, 2026-05)",
        "seed": "1234",
        "target": "150 iterations",
        "subset": "train",
        "weights": "0.8, 0.2",
        "tail": "drop",
        "separate final epoch": "never",
        "sequence length": "16",
        "steps": "200, of which 50 are past",
        "batch": "8 samples a step",
        "epochs built": "4",
        "megaindex": megaindex.__version__,
        "date": "2027-01-15 08:00 UTC",
    }


@pytest.mark.parametrize("count", [1, 67, 68])
def test_of_a_long_setting_the_start_is_shown(count: int, prefix: Path, tmp_path: Path) -> None:
    """The weights: 400 letters are shown as they are, 406 are closed."""
    data = [word for k in range(count) for word in (f"0.{k % 9 + 1}1", prefix)]
    words = [*data, "--seq-length", 16, "--global-batch-size", 8, "--train-iters", 9]
    status, _, err = cli("audit", "--data-path", *words, "--html", tmp_path / "a.html")
    assert status == 0, err
    text = (tmp_path / "a.html").read_text(encoding="utf-8")
    ((start, shown),) = re.findall(
        r"<dt>weights</dt><dd>(?:<details><summary>(.*?) …</summary>)?(.*?)(?:</details>)?</dd>",
        text,
    )
    assert len(shown) == 6 * count - 2
    assert len(start) == (200 if count == 68 else 0)
    assert shown.startswith(start)


def test_a_growing_batch_is_shown_by_its_bounds(prefix: Path, tmp_path: Path) -> None:
    run = ["--data-path", prefix, "--seq-length", 16, "--global-batch-size", 8, "--train-samples",
           64, "--rampup-batch-size", 4, 4, 16]  # fmt: skip
    assert cli("audit", *run, "--html", tmp_path / "page.html")[0] == 0
    assert "<dd>4 to 8 samples a step</dd>" in (tmp_path / "page.html").read_text()


def test_a_picture_is_a_file_of_its_own(page: str) -> None:
    (plot, *_) = re.findall("<svg xmlns.*?</svg>\n.*?</svg>", page, re.DOTALL)
    height = re.findall('height="([0-9]+)"', plot)[0]
    made = plots.picture(plot)
    root = ElementTree.fromstring(made)
    assert (root.get("width"), root.get("viewBox")) == ("900", f"0 0 900 {height}")
    style, paper = list(root)[:2]
    assert plots.variables(dark=False) in str(style.text)
    assert paper.get("fill") == "var(--back)"
    assert made.count("<style>") == 1
    assert made.endswith("\n")


def test_json_has_what_the_page_shows(prefix: Path) -> None:
    run = ["--data-path", prefix, "--seq-length", 16, "--global-batch-size", 8, "--epochs", 2]
    status, out, err = cli("audit", *run, "--order", "epoch", "--points", 4, "--json")
    assert status == 0, err
    shown = json.loads(out)
    assert shown["run_settings"]["seed"] == 1234
    first = shown["sources"][0]["first_repeated_step"]
    assert 0 < first <= shown["epoch_steps"][0] + 1
    curve = shown["exposure_curve"]
    (served, earlier) = (
        np.array(curve[name]).sum(axis=1)
        for name in ("tokens_by_source", "earlier_exposures_by_source")
    )
    assert (earlier / served).tolist() == curve["mean_earlier_exposures"]


def test_names_are_escaped(tmp_path: Path) -> None:
    names = ["<b>one", "&two;\"'"]
    for name in names:
        (tmp_path / name).mkdir()
        write_corpus(tmp_path / name / "c", np.full(60, 20))
    run = ["--data-path", *(tmp_path / name / "c" for name in names), "--seq-length", 16]
    run += [
        "--global-batch-size",
        4,
        "--epochs",
        2,
        "--order",
        "epoch",
        "--html",
        tmp_path / "page.html",
    ]
    status, _, err = cli("audit", *run)
    assert status == 0, err
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "<b>one" not in page
    assert "&two;" not in page
    assert "&lt;b&gt;one" in page
    assert "&amp;two;&quot;&#x27;" in page


@pytest.mark.parametrize(
    ("order", "epochs", "seen", "change"),
    [
        ("megatron", "1", r"0\.\d+% \(\d+\) never seen; 99\.\d+%", "No change is suggested"),
        (
            "megatron",
            "0.4",
            r"6\d\.\d+% .*never seen; 3\d\.\d+% ",
            "the whole corpus takes about 12",
        ),
        (
            "neox",
            "1.3",
            r"1[12]\.\d+% .*never seen; .* seen once; .* seen twice",
            "Choose a whole number of",
        ),
        ("epoch", "2", "seen twice or more, at most 2 times", "boundaries of epochs"),
        (
            "paddlenlp",
            "3.3",
            "seen twice or more, at most 4",
            "--separate-final-epoch never`; this page then shows the share never seen), or end the "
            "run with a whole epoch.",
        ),
    ],
)
def test_findings_of_one_source(
    prefix: Path, order: str, epochs: str, seen: str, change: str
) -> None:
    settings = Settings(
        order=order, data_path=(str(prefix),), seq_length=16, global_batch_size=8, epochs=epochs
    )
    result = audit(run_of_settings(resolve(settings)))
    assert re.search(seen, findings(result)[0])
    assert change in suggestions(result)[-1]


def test_findings_of_a_blend(tmp_path: Path) -> None:
    """400 samples of books are 4 epochs, those of web less than one."""
    for name, size in (("web", 3000), ("books", 100)):
        write_corpus(tmp_path / name, np.full(size, 16))
    paths = ("0.5", str(tmp_path / "web"), "0.5", str(tmp_path / "books"))
    settings = Settings(
        order="epoch", data_path=paths, seq_length=16, global_batch_size=8, train_samples="800"
    )
    result = audit(run_of_settings(resolve(settings)))
    web, books = source_counts(result)
    assert web.first_repeat is None
    # the first step that serves a sample number beyond the first epoch of books
    assert books.first_repeat == 99 * 2 // 8
    texts = findings(result)
    assert any("books repeats from step 24 on; it is served 4.00 times over" in t for t in texts)
    assert "1 of 2 sources never repeat." in texts
    assert "books 3.23% (now 50.00%); " in suggestions(result)[-1]
    settings = replace(settings, data_path=paths[1:2] + paths[1:2], train_samples="80")
    short = audit(run_of_settings(resolve(settings)))
    assert "the run ends before one epoch of them" in suggestions(short)[-1]


def audit_of(folder: Path, sources: dict[str, tuple[int, list[int]]], **settings: Any) -> Audit:
    """Audit a blend of sources, each with a weight and the lengths of its documents."""
    words: list[str] = []
    with inside(folder):
        for name, (weight, lengths) in sources.items():
            write_corpus(Path(name), lengths)
            words += [str(weight), name]
        settings = {"data_path": tuple(words), "seq_length": 16, **settings}
        return audit(run_of_settings(resolve(Settings(**settings))))


@pytest.mark.parametrize(
    ("sizes", "is_served_too_often"),
    [((24, 100), True), ((25, 100), False), ((16, 32), True), ((17, 32), False)],
)
def test_a_source_is_served_too_often_from_one_epoch_and_twice_the_least_on(
    sizes: tuple[int, int], is_served_too_often: bool, tmp_path: Path
) -> None:
    """24 samples of each source are served; one of 24 documents is served in one epoch."""
    lengths = ([16] * documents for documents in sizes)
    sources = {name: (1, each) for name, each in zip(("few", "many"), lengths, strict=True)}
    result = audit_of(tmp_path, sources, order="epoch", global_batch_size=4, train_samples="48")
    few, many = source_counts(result)
    assert (few.served, many.served) == (384, 384)
    said = suggestions(result)[-1]
    assert (f"few: served {24 / sizes[0]:.2f} times over" in said) == is_served_too_often
    assert ("many: the run ends before one epoch" in said) != is_served_too_often


@for_each("repeated", [5, 6])
def test_five_sources_that_repeat_are_named(repeated: int, tmp_path: Path) -> None:
    """5 documents of 16 tokens are served twice; one of 40 is in no sample."""
    sources = {f"few{k}": (1, [16] * 5 + [40]) for k in range(repeated)}
    sources["many"] = 1, [16] * 2000
    run = {"order": "packed", "long_documents": "skip", "global_batch_size": repeated + 1}
    result = audit_of(tmp_path, sources, **run, train_samples=str(10 * (repeated + 1)))
    said, more = findings(result), repeated - 5
    names = [f"few{k}" for k in range(5)]
    assert [text.split(" repeats")[0] for text in said if " repeats from" in text] == names
    assert [text.split(": 40")[0] for text in said if ": 40 tokens (33.33%)" in text] == names
    for what in (
        "repeats; the table of sources lists the steps",
        "has tokens in no sample of an epoch",
    ):
        assert [t for t in said if what in t] == [f"1 more source {what}."] * more
    assert f"1 of {repeated + 1} sources never repeat." in said
    named = ", ".join([*names, *["1 more"] * more])
    assert f"{named}: served up to 1.33 times over, while parts of" in suggestions(result)[-1]


@pytest.mark.parametrize(
    ("documents", "suggested"),
    [
        (101, "No change is suggested: less than 1 % of each source is never seen"),
        (100, "one: the run ends before one epoch of them; a longer run"),
    ],
)
def test_a_source_is_seen_in_part_if_one_percent_of_it_is_not(
    documents: int, suggested: str, tmp_path: Path
) -> None:
    """All documents but one, once."""
    sources = {"one": (documents - 1, [16] * documents), "two": (100, [16] * 100)}
    run = {"order": "packed", "global_batch_size": 1, "train_samples": f"{documents + 99}"}
    result = audit_of(tmp_path, sources, **run)
    assert not any("never repeat" in text for text in findings(result))
    (text,) = suggestions(result)
    assert text.startswith(suggested)


@pytest.mark.parametrize(("documents", "steps"), [(40, 5), (41, 6)])
def test_the_steps_of_the_whole_corpus_are_rounded_up(
    documents: int, steps: int, tmp_path: Path
) -> None:
    """Two steps serve 16 documents."""
    run = {"order": "packed", "global_batch_size": 8, "train_samples": "16"}
    result = audit_of(tmp_path, {"web": (1, [16] * documents)}, **run)
    assert f"takes about {steps} steps, not 2." in suggestions(result)[-1]


def test_the_distances_of_repeats_are_those_of_the_served_tokens(tmp_path: Path) -> None:
    """Each document is a sample, served twice."""
    run = {"order": "packed", "global_batch_size": 1, "train_samples": "60"}
    result = audit_of(tmp_path, {"web": (1, [16] * 30)}, **run)
    document = result.run.index.locate(range(60)).document
    steps = np.sort([np.ptp(np.flatnonzero(document == k)) for k in range(30)])
    tenth, median, most = steps[[2, 14, 26]]  # of 30: 10 %, half and 90 % are up to there
    assert distance_text(result) == (
        f"Tokens served again: 480. Steps since the last time: at least {steps[0]}, median "
        f"{median}; 10 % within {tenth}, 90 % within {most}."
    )
    for last, label in ((2, "2× and more"), (3, "2×")):
        _, rows = times_seen(result, last, lambda _, count: f"{count}")
        assert rows == [["0×", "0", "0"], ["1×", "0", "0"], [label, "480", "30"]]


def test_the_picture_of_the_documentation_shows_what_its_text_says(tmp_path: Path) -> None:
    """docs/audit_sample.py, on a smaller corpus: one jump, from 2 earlier exposures to 3."""
    sample = runpy.run_path(str(Path(__file__).parents[2] / "docs/audit_sample.py"))
    sample["make_corpus"](tmp_path / "corpus", documents=7_000)
    result = audit(run_of_settings(sample["sample_run"](tmp_path / "corpus")), points=120)
    (jump,) = result.jumps
    assert (round(jump.before), round(jump.after)) == (2, 3)


def test_the_same_audit_gives_the_same_page(prefix: Path, tmp_path: Path) -> None:
    run = ["--data-path", prefix, "--seq-length", 16, "--global-batch-size", 8, "--epochs", 1]
    texts = []
    for _ in range(2):
        assert cli("audit", *run, "--html", tmp_path / "page.html")[0] == 0
        texts.append((tmp_path / "page.html").read_text(encoding="utf-8"))
    assert texts[0] == texts[1]
    assert "No token is served twice" in texts[0]


def test_a_page_that_cannot_be_written_is_an_error(prefix: Path, tmp_path: Path) -> None:
    run = ["--data-path", prefix, "--seq-length", 16, "--global-batch-size", 8, "--epochs", 1]
    status, _, err = cli("audit", *run, "--html", tmp_path / "missing" / "page.html")
    assert status == 2
    assert "missing does not exist; write the page (--html) to a disk" in err


def audit_to(page: Path, prefix: Path) -> tuple[int, str]:
    run = ["--data-path", prefix, "--seq-length", 16, "--global-batch-size", 8, "--epochs", 1]
    status, _, err = cli("audit", *run, "--html", page)
    return status, err


def test_a_page_is_replaced_by_the_next_one_and_no_other_file(prefix: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert audit_to(page, prefix)[0] == 0
    first = page.read_bytes()
    page.write_bytes(first + b"<!-- of an earlier run -->")
    assert audit_to(page, prefix)[0] == 0
    assert page.read_bytes() == first
    page.write_bytes(b"<!DOCTYPE html>\n<title>my own</title>")
    status, err = audit_to(page, prefix)
    assert (status, err.count("page.html: the file exists and is not a page of")) == (2, 1)
    assert page.read_bytes() == b"<!DOCTYPE html>\n<title>my own</title>"
    assert [path.name for path in tmp_path.glob("*html*")] == ["page.html"]


def test_an_input_is_not_replaced(prefix: Path) -> None:
    index = Path(f"{prefix}.idx")
    before = index.read_bytes()
    status, err = audit_to(index, prefix)
    assert status == 2
    assert "is not a page of megaindex audit" in err
    assert index.read_bytes() == before


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(os.path.relpath(path))


def _link(path: Path) -> None:
    path.symlink_to("nothing")


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo, _socket, _link])
def test_what_is_no_file_is_neither_replaced_nor_waited_for(
    prefix: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], None]
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "pages"
    folder.mkdir()
    make(folder / "page.html")
    kind = stat.S_IFMT((folder / "page.html").lstat().st_mode)
    status, err = audit_to(folder / "page.html", prefix)
    assert (status, err.count("not a regular file; check the path")) == (2, 1)
    assert stat.S_IFMT((folder / "page.html").lstat().st_mode) == kind
    assert os.listdir(folder) == ["page.html"]


def test_no_name_beside_the_page_is_followed(prefix: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / ".page.html.part").symlink_to(victim)
    assert audit_to(tmp_path / "page.html", prefix)[0] == 0
    assert victim.read_text() == "precious"
    assert not (tmp_path / "page.html").is_symlink()


@pytest.mark.parametrize("date", ["tomorrow", "9" * 17, "-1"])
def test_a_date_is_checked_before_the_data_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, date: str
) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", date)
    run = ["--data-path", "no/such/data", "--seq-length", 16, "--global-batch-size", 8]
    status, _, err = cli("audit", *run, "--epochs", 1, "--html", tmp_path / "page.html")
    assert status == 2
    assert (
        f"SOURCE_DATE_EPOCH must be seconds since 1970, at most 253402300799, got '{date}'" in err
    )
    assert "SOURCE_DATE_EPOCH" not in cli("audit", *run, "--epochs", 1)[2]  # without a page


def test_the_folder_of_a_page_is_checked_before_the_data_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = ["--data-path", "no/such/data", "--seq-length", 16, "--global-batch-size", 8]
    page = tmp_path / "missing" / "page.html"
    status, _, err = cli("audit", *run, "--epochs", 1, "--html", page)
    assert status == 2
    assert f"page.html: cannot write: the folder {page.parent} does not exist" in err
    page.parent.mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) != str(page.parent))
    status, _, err = cli("audit", *run, "--epochs", 1, "--html", page)
    assert status == 2
    assert f"page.html: cannot write: no write access to {page.parent}" in err


@pytest.fixture(scope="module", params=[7, 8, 24, 25, 300])
def wide_page(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page of a blend of so many sources."""
    folder = tmp_path_factory.mktemp("wide")
    words: list[object] = []
    for number in range(request.param):
        rng = np.random.default_rng(number)
        write_corpus(folder / f"c{number:03}", rng.integers(5, 60, int(rng.integers(4, 20))))
        words += [1 + number % 5, folder / f"c{number:03}"]
    words += ["--seq-length", 16, "--global-batch-size", 32, "--train-iters", 5 * request.param]
    status, _, err = cli("audit", "--data-path", *words, "--order", "epoch", "--html",
                         folder / "a.html")  # fmt: skip
    assert status == 0, err
    return (folder / "a.html").read_text(encoding="utf-8")


def test_a_source_has_one_colour_and_a_colour_one_source(wide_page: str) -> None:
    legends = re.findall(r'<ul class="legend">(.*?)</ul>', wide_page)
    meaning: dict[str, set[str]] = {}
    for legend in legends:
        for colour, name in re.findall(r"var\(--(\w+)\)\"></i>(.*?)</li>", legend):
            meaning.setdefault(colour, set()).add(name)
    assert all(len(names) == 1 for names in meaning.values()), meaning
    sources = {name for names in meaning.values() for name in names if re.match(r"c\d", name)}
    assert len(sources) == 7
    listed = len({*re.findall(r">(c\d{3})<", wide_page)} | sources)
    count = 300 if listed == 200 else listed
    assert (meaning.get("others") == {f"{count - 7:,} others"}) == (count > 7)
    drawn = re.findall(r"(?:stroke|fill): var\(--(\w+)\)\" d=", wide_page)
    assert {*drawn} <= {*meaning, "all"}  # a curve of all sources


def test_four_sources_are_drawn_that_are_served_most_and_three_for_their_size(
    tmp_path: Path,
) -> None:
    """Of small sources, those served less are served more often."""
    sources = {f"small{k}": (k, [16] * (2 * k * k)) for k in range(1, 9)}
    sources |= {f"large{k}": (20 - k, [16] * 400) for k in range(5)}
    result = audit_of(tmp_path, sources, order="epoch", global_batch_size=8, train_samples="1008")
    colours = plots.source_colours(result)
    names = [result.run.sources[number].name for number in colours]
    assert names == [*(f"large{k}" for k in range(4)), "small3", "small2", "small1"]
    assert list(colours.values()) == list("abcdefg")


def test_of_many_sources_the_worst_are_open_and_the_rest_closed(wide_page: str) -> None:
    tables = re.findall(r'<table class="sources">(.*?)</table>', wide_page, re.DOTALL)
    rows = [re.findall(r'<tr><td data-name="source">(.*?)</td>', table) for table in tables]
    epochs = [
        [float(text) for text in re.findall(r'data-name="epochs served">(.*?)</td>', table)]
        for table in tables
    ]
    count = sum(map(len, rows))
    assert "details" in wide_page or count <= 24
    if count <= 24:
        assert len(tables) == 1
        return
    assert [len(part) for part in rows] == [10, min(200, count) - 10]
    assert len({*rows[0], *rows[1]}) == count
    assert min(epochs[0]) >= max(epochs[1])
    assert f"<details><summary>{count - 10} more sources</summary>" in wide_page
    assert re.search(r"</table>\s*<p>[\d,]+ of [\d,]+ sources repeat", wide_page)
    total = 300 if count == 200 else count
    (most,) = re.findall(rf"of {total} sources repeat, at most ([\d.]+) epochs are", wide_page)
    assert float(most) == pytest.approx(epochs[0][0], abs=0.0051)
    assert ("--json lists all 300 sources" in wide_page) == (total == 300)
    assert "details[open]" not in wide_page
    assert "details-content" not in wide_page  # closed in print too


def test_the_page_of_many_sources_prints_on_four_sheets(wide_page: str) -> None:
    """Blocks of the open page, one after another, none of them divided: by arithmetic."""
    body = re.sub(r"<details>.*?</summary>(.*?)</details>", "", wide_page, flags=re.DOTALL)
    body = body.partition("<body>")[2]
    point, line = 25.4 / 72, 9.5 * 1.35 * 25.4 / 72  # mm
    sheets, left = 1, 297.0 - 28
    for block in re.findall(
        r"<tr>.*?</tr>|<section.*?</figure>|<li>.*?</li>|<p>.*?</p>|<dd>.*?</dd>", body, re.DOTALL
    ):
        pixels = sum(map(int, re.findall(r'<svg xmlns[^>]*height="(\d+)"', block)))
        text = re.sub(r"<svg.*</svg>|<[^>]+>", "", block, flags=re.DOTALL)
        lines = 1 + len(text) // (0.8 * 182 / (4.75 * point)) + 3 * ("<h2>" in block)
        height = pixels * 25.4 / 96 + lines * line + 2
        if height > left:
            sheets, left = sheets + 1, 297.0 - 28
        left -= height
    assert sheets <= 4


def test_every_run_has_a_title_of_its_own(page: str, wide_page: str, tmp_path: Path) -> None:
    (title,) = re.findall(r"<title>(.*?)</title>", page)
    assert title == "web, books: 200 steps, order neox – megaindex audit"
    (other,) = re.findall(r"<title>(.*?)</title>", wide_page)
    assert re.fullmatch(r"\d+ sources: [\d,]+ steps, order epoch – megaindex audit", other)
    name = "<b>" + 80 * "x"
    write_corpus(tmp_path / name, np.arange(1, 60))
    words = [tmp_path / name, "--seq-length", 16, "--global-batch-size", 8, "--epochs", 1]
    assert cli("audit", *words, "--html", tmp_path / "a.html")[0] == 0
    (title,) = re.findall(r"<title>(.*?)</title>", (tmp_path / "a.html").read_text())
    assert title.startswith("…xxx")
    assert len(title) < 110


def boxes_of(plot: str, width: float) -> list[tuple[float, float, float, float]]:
    """Bounds of the texts of a plot on a page of that width, with digits of 6.7 pixels."""
    found = []
    for attributes, words in re.findall(r"<text ([^>]*)>([^<]*)</text>", plot):
        given = dict(re.findall(r'([a-z-]+)="([^"]*)"', attributes))
        place = given["x"]
        x = float(place.rstrip("%")) * (width / 100 if "%" in place else 1)
        x += float(given.get("dx", 0))
        size = 6.7 * len(words) * (1 if re.match(r"[\d,.%]*$", words) else 0.93)
        x -= size * {"end": 1, "middle": 0.5}.get(given.get("text-anchor", ""), 0)
        y = float(given["y"])
        found.append((x, x + size, y - 9, y + 3))
    return found


@for_each("width", [368, 928])
@for_each("steps", [150, 1_500_000])
def test_texts_of_plots_do_not_overlap(page: str, wide_page: str, width: int, steps: int) -> None:
    """On screens of 400 and 960 pixels, with the numbers of a long run in place of those."""
    for text in (page, wide_page):
        for plot in re.findall(r"<svg xmlns(?:(?!<figcap).)*</svg>", text, re.DOTALL):
            if steps > 150:
                plot = re.sub(r'(text-anchor="middle">)[\d,]+', rf"\g<1>{steps:,}", plot)
            boxes = boxes_of(plot, width)
            assert all(left >= -16 and right <= width + 16 for left, right, _, _ in boxes)
            for a, b in itertools.combinations(boxes, 2):
                assert a[1] <= b[0] or b[1] <= a[0] or a[3] <= b[2] or b[3] <= a[2], (a, b)


def test_sources_that_repeat_come_first_or_else_those_read_least() -> None:
    def counts(name: str, served: int, more: float) -> SourceCounts:
        return SourceCounts(
            name=name, tokens=10, served=served, of_served=0.5, unseen=0.1, once=0.9 - more,
            more=more, first_repeat=None,
        )  # fmt: skip

    read, hardly = counts("read", 9, 0), counts("hardly", 2, 0)
    assert worst_sources([read, hardly]) == [hardly, read]
    assert worst_sources([hardly, counts("often", 30, 0.1)])[0].name == "often"
