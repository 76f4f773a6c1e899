"""Locks: what they pin, that each field of one matters, and the loaders that they give."""

from __future__ import annotations

import copy
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import xxhash
from support.command_line import cli
from support.corpora import write_corpus
from support.folders import inside
from support.inputs import for_each
from support.locked_runs import RUNS, write_inputs

from megaindex.audit.lock_side import side_from_lock
from megaindex.errors import FormatError, InvalidArgument, MegaIndexError, MissingFile, StorageError
from megaindex.lock import Lock, make_lock, open_run, read_lock, verify_lock
from megaindex.lock.lock_file import lock_text
from megaindex.lock.pinned_files import all_token_hashes, file_facts, file_hash, sound_paths
from megaindex.lock.recipe_settings import _same_run
from megaindex.lock.settings import read_settings
from megaindex.lock.shape import SECTIONS
from megaindex.progress import silent
from megaindex.recipe import Recipe, read_recipe
from megaindex.run.subset import step_bounds_of

URL = "s3://bucket/ids"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder of corpora and settings, in which every run is locked as NAME.lock."""
    folder = tmp_path_factory.mktemp("runs")
    write_inputs(folder)
    with inside(folder):
        for name, flags in RUNS.items():
            assert cli("lock", *flags.split(), "--out", f"{name}.lock", "--tokens")[::2] == (0, "")
        yield folder


@pytest.fixture(autouse=True)
def _there(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)


def rules(path: Any, **options: Any) -> list[str]:
    return [f"{found.file} {found.rule}" for found in verify_lock(path, **options).findings]


@for_each("name", RUNS)
def test_a_lock_is_verified_and_opens_the_run(name: str) -> None:
    lock = read_lock(f"{name}.lock")
    train = lock.content["subsets"]["train"]
    assert rules(f"{name}.lock", whole=True, tokens=True) == []
    first = train["steps"][0][2] if train["steps"][0][1] == 0 else 0
    assert rules(f"{name}.lock", step=first + 2) == []
    pytest.importorskip("torch")
    receipts = []
    is_recipe = lock.content["settings"]["kind"] == "recipe"
    ranks = 2 if is_recipe or name == "megatron" else 1
    for rank in range(ranks):
        loader = open_run(lock, data_parallel_rank=rank, data_parallel_size=ranks, read_ahead=0)
        for _ in loader:
            pass
        assert loader.consumed_samples == train["samples"]
        state = loader.state_dict()
        receipts.append(state["receipt"])
    from megaindex.index.receipts import BlockReceipts, Receipt

    served = [BlockReceipts.from_dict(each["ladder"]).total for each in receipts]
    total = sum(served, Receipt())
    left_out = sum(end - begin for begin, end in train["index"].get("left_out", ()))
    served = train["samples"] - train["steps"][0][0] - left_out
    assert (str(total), total.count) == (train["receipts"]["total"], served)


def test_arrays_are_built_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The index that the settings give is that of the lock; only ``step`` builds from the lock."""

    def build(*args: Any, **options: Any) -> Any:
        raise InvalidArgument("built from the description")

    monkeypatch.setattr("megaindex.lock.check.build_described", build)
    assert rules("megatron.lock", whole=True) == []
    assert rules("megatron.lock", step=2) == ["megatron.lock content"]


def test_a_lock_has_the_steps_of_its_batch_schedule() -> None:
    steps = read_lock("megatron.lock").content["subsets"]["train"]["steps"]
    assert steps == [[0, 4, 6], [24, 8, 9]]
    assert read_lock("recipe.lock").content["subsets"]["train"]["steps"] == [
        [0, 8, 19],
        [152, 4, 1],
    ]


@for_each("name", RUNS)
def test_settings_are_read_as_they_were_written(name: str) -> None:
    lock = read_lock(f"{name}.lock")
    content = lock.content
    paths = [source.path for source in lock.sources]
    files = [file.path for file in lock.files]
    settings = read_settings(lock, paths, files)
    kind = content["settings"]["kind"]
    if kind == "run":
        rows, named = ({path: row for row, path in enumerate(each)} for each in (paths, files))
        assert settings.to_json(rows, named) == content["settings"][kind]
    amend = getattr(settings, "amend", None)
    again = make_lock(settings.settings, amend=amend).write("again.lock", overwrite=True)
    assert again.content["subsets"] == {**content["subsets"]}


GOLDEN = sorted((Path(__file__).parents[1] / "golden" / "locks").glob("*.lock"))


@for_each("golden", GOLDEN)
def test_locks_of_earlier_versions_are_read(golden: Path) -> None:
    shutil.copy(golden, "golden.lock")
    assert rules("golden.lock", whole=True, tokens=True) == []
    ours, theirs = read_lock(f"{golden.stem}.lock").content, read_lock("golden.lock").content
    assert ours["subsets"] == theirs["subsets"]


def flip(path: str, at: int) -> Callable[[], None]:
    """Change a byte of a file; return the function that changes it back."""
    text = bytearray(Path(path).read_bytes())
    original = bytes(text)
    text[at] ^= 1
    Path(path).write_bytes(text)
    return lambda: Path(path).write_bytes(original) and None


@pytest.mark.parametrize("at", [5, 20, 100, 34 + 4 * 120 + 9, -3])
def test_a_flipped_byte_of_an_idx_is_found_and_named(at: int) -> None:
    undo = flip("data/code.idx", at)
    try:
        assert rules("recipe.lock") == [f"{Path.cwd()}/data/code.idx idx"]
        with pytest.raises((FormatError, StorageError), match=r"data/code.idx: XXH3-64"):
            open_run("recipe.lock")
    finally:
        undo()


def test_a_flipped_byte_of_a_bin_is_found_with_tokens() -> None:
    undo = flip("data/chat.bin", 99)
    try:
        assert rules("neox.lock") == []
        (found,) = verify_lock("neox.lock", tokens=True).findings
        size = os.path.getsize("data/chat.bin")
        assert (found.file, found.where) == (f"{Path.cwd()}/data/chat.bin", f"bytes 0 to {size}")
    finally:
        undo()


def test_hashes_do_not_depend_on_the_pieces_that_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not on a last piece that is shorter either."""
    monkeypatch.setattr("megaindex.lock.pinned_files.LEAST_CHUNK", 3000)
    write_corpus(tmp_path / "web", [100] * 90)
    locks = []
    for piece in (1 << 24, 1000, 999):
        monkeypatch.setattr("megaindex.lock.pinned_files._PIECE", piece)
        settings = {"data_path": tmp_path / "web", "seq_length": 16, "global_batch_size": 4}
        locks.append(make_lock(epochs=1, tokens=True, **settings))
    tokens = (tmp_path / "web.bin").read_bytes()
    hashes = [
        xxhash.xxh3_64_hexdigest(tokens[at : at + 3000]) for at in range(0, len(tokens), 3000)
    ]
    assert len(hashes) > 5
    assert [lock.content["tokens"] for lock in locks] == [
        {"chunk_bytes": 3000, "hashes": ["".join(hashes)]}
    ] * 3
    assert len({json.dumps(lock.content["sources"]) for lock in locks}) == 1


def test_every_flipped_byte_of_a_lock_is_found() -> None:
    text = Path("flags.lock").read_bytes()
    try:
        for at in range(0, len(text), 7):
            Path("flipped.lock").write_bytes(text[:at] + bytes([text[at] ^ 1]) + text[at + 1 :])
            with pytest.raises(FormatError, match=r"flipped\.lock: "):
                read_lock("flipped.lock")
    finally:
        Path("flipped.lock").unlink()


def leaves(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the places of all values of JSON that are no mapping and no list."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, each in items:
        if isinstance(each, (dict, list)) and each:
            yield from leaves(each, (*place, key))
        else:
            yield (*place, key)


def changed(content: Any, place: tuple[Any, ...]) -> Any:
    """Return the content with another value of the same kind at a place."""
    content = copy.deepcopy(content)
    inside = content
    for key in place[:-1]:
        inside = inside[key]
    value = inside[place[-1]]
    if isinstance(value, bool):
        value = not value
    elif isinstance(value, int):
        value += 1
    elif isinstance(value, str):
        value = value[:-1] + ("1" if value[-1:] != "1" else "2")
    else:
        value = 3 if value is None else None
    inside[place[-1]] = value
    return content


FREE = {"written_by", "root", "digests", "digest"}
DECIDING = {"sequence_length", "seed", "path", "proportion", "kind", "value", "split", "name"}
"""Settings that decide samples in every run here; that of others may be the same with another
value, and the digest of their section alone shows the change."""


@pytest.mark.parametrize(
    "name",
    [name if name == "phases" else pytest.param(name, marks=pytest.mark.slow) for name in RUNS],
)
def test_every_field_matters(name: str, home: Path) -> None:
    """Of a lock that was edited and given the right digests again, too."""
    content, unseen = read_lock(f"{name}.lock").content, []
    for place in leaves(dict(content)):
        if place[0] in FREE or (place[0] == "settings" and place[-1] not in DECIDING):
            continue
        Path("edited.lock").write_bytes(lock_text(changed(content, place)))
        try:
            found = rules("edited.lock", whole=True, tokens=True)
        except MegaIndexError:
            continue
        except Exception as error:
            raise AssertionError(place) from error
        if not found:
            unseen.append(".".join(map(str, place)))
    assert unseen == []


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        ("neox", [[0, 4, 40]]),
        ("neox", [[0, 16, 10]]),
        ("flags", [[0, 8, 33], [264, 4, 2]]),
        ("recipe", [[0, 8, 18], [144, 12, 1]]),
        ("past", [[40000, 0, 5000], [40000, 4, 24]]),
    ],
)
def test_the_positions_of_a_step_are_those_of_the_settings(name: str, steps: Any) -> None:
    """One block of receipts has the same samples in steps of any size."""
    content = copy.deepcopy(read_lock(f"{name}.lock").content)
    train = content["subsets"]["train"]
    first = 5000 if name == "past" else 0
    count = sum(number for _, _, number in steps)
    train["steps"], train["receipts"]["block_steps"] = steps, count - first
    Path("steps.lock").write_bytes(lock_text(content))
    found = {step: rules("steps.lock", step=step) for step in range(first, count)}
    assert found[count - 1] == ["steps.lock steps"]
    if name not in ("flags", "recipe"):
        assert all(rule == ["steps.lock steps"] for rule in found.values())
    else:
        assert found[first] == []


@pytest.mark.parametrize(
    ("step", "positions"),
    [(19, "152 to 159"), (20, "fewer steps"), (range(1, 20), "8 to 159"),
     (range(1, 21), "fewer steps")],
)  # fmt: skip
def test_the_positions_by_the_settings_are_named(step: int | range, positions: str) -> None:
    """The settings have 20 steps of 8 samples; the lock was edited to 40 of 4."""
    content = copy.deepcopy(read_lock("neox.lock").content)
    train = content["subsets"]["train"]
    train["steps"], train["receipts"]["block_steps"] = [[0, 4, 40]], 40
    Path("steps.lock").write_bytes(lock_text(content))
    (found,) = verify_lock("steps.lock", step=step).findings
    first, last = (step[0], step[-1]) if isinstance(step, range) else (step, step)
    which = f"step {first}" if first == last else f"steps {first} to {last}"
    assert (found.where, found.found, found.expected) == (
        f"subsets.train.steps: positions of {which}",
        f"{4 * first} to {4 * last + 3}",
        f"{positions}, by the batches of the settings",
    )


def test_a_verification_says_what_it_compared() -> None:
    report = verify_lock("skips.lock", step=3)
    assert [text for text in report.compared if ".idx" in text] == []
    assert any("step 3" in text for text in report.compared)
    assert "compared every other file, every .idx" in cli("verify", "skips.lock")[1]
    undo = flip("data/code.idx", 20)
    try:
        assert "compared nothing" in cli("verify", "neox.lock")[1]
    finally:
        undo()


def test_a_changed_section_is_named() -> None:
    text = Path("recipe.lock").read_text()
    for old, new, section in (
        ('"steps": 12', '"steps": 13', "settings"),
        ('"data/web"', '"data/wob"', None),
        ('["web","', '["wob","', "sources"),
        ('"shares": [7, 3]', '"shares": [7, 4]', "subsets"),
        ('"root": "data"', '"root": "date"', "a field outside the sections"),
    ):
        if section is None:
            continue
        assert old in text
        Path("edited.lock").write_text(text.replace(old, new, 1))
        with pytest.raises(FormatError, match=f"edited.lock: (section )?{section}: must be"):
            read_lock("edited.lock")
        assert "edited.lock digest" in rules("edited.lock")
    assert set(SECTIONS) == set(read_lock("recipe.lock").content["digests"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text[: len(text) // 2], "it may have been truncated"),
        (
            lambda text: text.replace('"version": 3', '"version": 1'),
            r"has version 1 of the format, .* the release that wrote it, .*1\.0",
        ),
        (lambda _: '{"format": "megaindex run lock", "version": 4}', "release that wrote it$"),
        (lambda text: text.replace('"megaindex run lock"', '"lock"'), "format must be"),
        (lambda text: text.replace('"files": []', '"files": {}'), "files must be a list"),
        (lambda _: "[]", "is not a JSON object"),
    ],
)
def test_other_files_are_refused(change: Callable[[str], str], message: str) -> None:
    Path("other.lock").write_text(change(Path("flags.lock").read_text()))
    with pytest.raises(FormatError, match=message):
        read_lock("other.lock")
    assert rules("other.lock") == ["other.lock lock"]


def test_missing_and_moved_sources(tmp_path: Path) -> None:
    with pytest.raises(MissingFile, match=r"none\.lock does not exist"):
        read_lock("none.lock")
    for suffix in (".idx", ".bin"):
        (tmp_path / "deep").mkdir(exist_ok=True)
        Path(f"data/code{suffix}").rename(tmp_path / "deep" / f"moved{suffix}")
    try:
        assert rules("neox.lock") == [f"{Path.cwd()}/data/code missing"]
        with pytest.raises(MissingFile, match="neox.yml: is not a folder; give one that holds th"):
            rules("neox.lock", search="neox.yml")
        decoy = tmp_path / "deep" / "a"  # of the same size, with documents of other lengths
        shutil.copy(tmp_path / "deep" / "moved.bin", f"{decoy}.bin")
        shutil.copy("data/web.idx", f"{decoy}.idx")
        (tmp_path / "without.idx").touch()  # its .bin
        assert rules("neox.lock", search=tmp_path) == []
        shutil.copy(tmp_path / "deep" / "moved.idx", f"{decoy}.idx")  # with other tokens
        Path(f"{decoy}.bin").write_bytes(bytes(os.path.getsize(f"{decoy}.bin")))
        assert rules("neox.lock", search=tmp_path, tokens=True) == [f"{decoy}.bin tokens"]
        for suffix in (".idx", ".bin"):
            shutil.copy(tmp_path / "deep" / f"moved{suffix}", tmp_path / "deep" / f"code{suffix}")
        assert rules("neox.lock", search=tmp_path, tokens=True) == []  # that of the same name
        with pytest.raises(MissingFile, match="data/code: neox.lock names this pair"):
            open_run("neox.lock")
        assert cli("verify", "neox.lock", "--search", tmp_path)[0] == 0
        if pytest.importorskip("torch"):
            assert len(open_run("neox.lock", search=tmp_path)) == 40
    finally:
        for suffix in (".idx", ".bin"):
            (tmp_path / "deep" / f"moved{suffix}").rename(f"data/code{suffix}")


def test_missing_pairs_are_counted(tmp_path: Path) -> None:
    shutil.copytree("data", tmp_path / "data")
    lock = read_lock(shutil.copy("neox.lock", tmp_path))
    for name, more in (
        ("web", ""),
        ("code", ", nor .* 1 other pair"),
        ("chat", ".* 2 other pairs"),
    ):
        os.remove(tmp_path / "data" / f"{name}.bin")
        with pytest.raises(MissingFile, match=f"data/web: .* does not exist{more}; restore it"):
            sound_paths(lock)


def test_an_existing_lock_is_refused_before_the_data_are_read() -> None:
    run = "--seq-length 8 --global-batch-size 4 --train-iters 2 --data-path nowhere"
    status, _, err = cli("lock", *run.split(), "--out", "neox.lock")
    assert (status, err.count("\n")) == (2, 1)
    assert "neox.lock: already exists" in err


@for_each("name", RUNS)
def test_a_side_has_the_samples_that_the_run_serves(name: str) -> None:
    """Not those that its framework builds besides."""
    subset = read_lock(f"{name}.lock").subset("train")
    left_out = subset["index"].get("left_out", [])
    first = subset["steps"][0][0]
    served = subset["samples"] - first - sum(end - begin for begin, end in left_out)
    assert side_from_lock(f"{name}.lock").index.num_samples == served


def test_a_padded_last_step_is_served() -> None:
    torch = pytest.importorskip("torch")
    lock = make_lock(
        data_path=["data/web"], order="epoch", seq_length=8, micro_batch_size=2,
        data_parallel_size=1, global_batch_size=4, train_samples=10, tail="pad",
    )  # fmt: skip
    loader = open_run(lock.write("padded.lock"))
    rows = torch.cat([batch["loss_mask"].any(dim=1) for batch in loader])
    assert (loader.consumed_samples, rows.sum().item(), rows.numel()) == (10, 10, 12)


def test_hashes_of_large_corpora_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("pinned_files", "shape"):
        monkeypatch.setattr(f"megaindex.lock.{module}.LEAST_CHUNK", 64)
    monkeypatch.setattr("megaindex.lock.pinned_files._MOST_CHUNKS", 8)
    settings: dict[str, Any] = {
        "data_path": ["data/web", "data/code"], "order": "epoch", "seq_length": 8,
        "global_batch_size": 4, "train_iters": 2,
    }  # fmt: skip
    lock = make_lock(tokens=True, **settings).write("few.lock")
    chunks = [len(each) // 16 for each in lock.content["tokens"]["hashes"]]
    assert 2 < sum(chunks) <= 8 + len(chunks)
    assert rules("few.lock", tokens=True) == []
    for whole, tokens in ((False, True), (True, False), (True, True)):
        assert verify_lock("few.lock", whole=whole, tokens=tokens).full == (whole and tokens)
    chunk = lock.content["tokens"]["chunk_bytes"]
    undo = [flip("data/web.bin", at) for at in (chunk, 2 * chunk)]
    try:
        (found,) = verify_lock("few.lock", tokens=True).findings
        assert (found.where, found.count) == (f"bytes {chunk} to {2 * chunk}", 2)
    finally:
        undo[1]()
        undo[0]()


def test_chunks_double_beyond_the_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megaindex.lock.pinned_files.LEAST_CHUNK", 64)
    monkeypatch.setattr("megaindex.lock.pinned_files._MOST_CHUNKS", 8)
    for size, chunk in ((64 * 8, 64), (64 * 8 + 1, 128), (128 * 8, 128), (128 * 8 + 1, 256)):
        (tmp_path / "c.bin").write_bytes(bytes(size))
        found = all_token_hashes([str(tmp_path / "c")], "xxh3-64", silent)
        assert found["chunk_bytes"] == chunk


def test_a_lock_is_moved_with_its_data_or_without(tmp_path: Path) -> None:
    home, names = Path.cwd(), [Path(source.path).name for source in read_lock("neox.lock").sources]
    shutil.copytree("data", tmp_path / "copy" / "data")
    with_data = Path(shutil.copy("neox.lock", tmp_path / "copy"))
    found = [source.path for source in read_lock(with_data).sources]
    assert found == [f"{tmp_path}/copy/data/{name}" for name in names]
    os.chdir(tmp_path)
    again = read_lock(with_data).write(tmp_path / "again.lock")  # above the copy of the data
    assert [source.path for source in again.sources] == found
    (tmp_path / "apart").mkdir()
    read_lock(home / "neox.lock").write(tmp_path / "apart" / "apart.lock")
    alone = Path(tmp_path / "apart" / "apart.lock").rename(tmp_path / "alone.lock")
    assert [source.path for source in read_lock(alone).sources] == [
        f"{home}/data/{name}" for name in names
    ]


@pytest.mark.parametrize("window", [1, 37, 1 << 24])
def test_source_by_source_gives_the_same_receipts(
    window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The receipts of the lock are computed in order of training, as of any short run."""
    monkeypatch.setattr("megaindex.index.staged_index.WORTH_SORTING", 1)
    monkeypatch.setattr("megaindex.index.staged_index.WINDOW", window)
    assert rules("recipe.lock", whole=True) == []


def test_tables_of_large_corpora_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megaindex.builders.single._WORTH_KEEPING", 1)
    kept = []
    for _ in range(2):
        assert rules("flags.lock", step=3, cache_dir=tmp_path) == []
        kept.append(sorted(tmp_path.glob("*/starts*.npy")))
    assert kept[0]
    assert kept[0] == kept[1]
    assert cli("verify", tmp_path, "--full", "--workers", 1)[0] == 0
    with monkeypatch.context() as without_hashing:
        without_hashing.setattr("megaindex.builders.recipe.corpus_fingerprint", None)
        assert rules("flags.lock", step=3, cache_dir=tmp_path) == []
    undo = flip("data/web.idx", 40)
    try:
        assert rules("flags.lock", step=3, cache_dir=tmp_path) == [
            f"{Path.cwd()}/data/web.idx fingerprint"
        ]
    finally:
        undo()


def test_a_cache_that_cannot_be_used_is_a_finding() -> None:
    (found,) = verify_lock("flags.lock", step=1, cache_dir="s3://bucket/cache").findings
    assert (found.rule, found.file) == ("cache", "s3://bucket/cache")
    assert "lies in an object store" in found.found
    assert found.repair == "remove the entry of the cache, or verify without --cache-dir"


def test_a_lock_is_shown_with_its_steps_and_absolute_paths() -> None:
    lock = read_lock("flags.lock")
    assert repr(lock) == "Lock('flags.lock': 1 pairs, train 272 samples in 34 steps)"
    content = read_lock("skips.lock").content
    files = [{**content["files"][0], "path": path} for path in ("/elsewhere/ids", "ids", URL)]
    moved = Lock(path="/runs/skips.lock", content={**content, "files": files, "root": "data"})
    assert [file.path for file in moved.files] == ["/elsewhere/ids", "/runs/data/ids", URL]


def test_files_that_are_not_there_are_named() -> None:
    with pytest.raises(MissingFile, match="none.ids: the file of skipped documents or mix chang"):
        file_facts("none.ids")
    with pytest.raises(MissingFile, match="none.bin: does not exist; restore it"):
        file_hash("none.bin")


def test_changes_that_no_file_holds_are_not_locked() -> None:
    changes = read_recipe("lengths.yaml").mix_changes
    assert changes is not None
    recipe = replace(read_recipe("lengths.yaml"), mix_changes=replace(changes, path=""))
    with pytest.raises(InvalidArgument, match="must be a file, got changes that none holds; write"):
        make_lock(recipe)


@pytest.mark.parametrize("name", ["neox", "recipe"])
def test_steps_of_an_evaluation_follow_from_the_settings(name: str) -> None:
    lock = read_lock(f"{name}.lock")
    settings = read_settings(lock, [source.path for source in lock.sources], [])
    for subset in lock.content["subsets"].keys() - {"train"}:
        locked = lock.content["subsets"][subset]
        steps = settings.step_bounds(subset, locked)
        assert steps.tolist() == step_bounds_of(locked).tolist()
        assert verify_lock(lock.path, step=0, subset=subset).is_clean


def test_a_run_is_the_same_if_all_its_counts_are() -> None:
    layout = {"sizes": (), "stages": (), "num_steps": 3, "samples_masked": 0, "ends": (),
              "stopped_by": None}  # fmt: skip
    opened: Any = SimpleNamespace(layout=SimpleNamespace(**layout))
    assert _same_run(opened, SimpleNamespace(**layout))  # type: ignore[arg-type]
    for name in ("num_steps", "samples_masked", "ends", "stopped_by"):
        other: Any = SimpleNamespace(**{**layout, name: 7})
        assert not _same_run(opened, other)


def test_files_of_skipped_documents_are_checked(tmp_path: Path) -> None:
    text = Path("bad.ids").read_text()
    try:
        for changed, rule in ((f"{text} 1", "bytes"), (text.replace("3", "4", 1), "sha256")):
            Path("bad.ids").write_text(changed)
            assert rules("skips.lock") == [f"{Path.cwd()}/bad.ids {rule}"]
            assert rules("skips.lock", step=1) == [f"{Path.cwd()}/bad.ids {rule}"]
            with pytest.raises(FormatError, match=r"bad\.ids: .* as in skips\.lock"):
                open_run("skips.lock")
        Path("bad.ids").rename(tmp_path / "moved")
        (tmp_path / "other").write_text(changed)
        assert rules("skips.lock") == [f"{Path.cwd()}/bad.ids missing"]
        with pytest.raises(MissingFile, match=r"bad\.ids: the file: must be"):
            open_run("skips.lock")
        (tmp_path / "moved").write_text(text)
        assert rules("skips.lock", search=tmp_path, whole=True) == []
    finally:
        Path("bad.ids").write_text(text)


@pytest.mark.parametrize(
    ("flags", "framework"),
    [
        (RUNS["neox"], "neox"),
        (RUNS["neox"] + " --variance-buffer exact --separate-final-epoch never", "neox"),
        (RUNS["megatron"], "megatron"),
        (RUNS["phases"], "megatron"),
        (RUNS["skips"].split("--skip")[0] + "--iterations-to-skip 2 5", "megatron"),
    ],
)
def test_settings_of_a_lock_give_its_samples(flags: str, framework: str) -> None:
    """A lock of the printed settings alone is the same; the adapter's call is printed with them."""
    assert cli("lock", *flags.split(), "--out", "first.lock", "--overwrite")[0] == 0
    status, text, said = cli("plan", "--lock", "first.lock", "--print-config", framework)
    assert (status, said) == (0, "")
    assert ("install(" in text) == ("--variance-buffer" in flags)
    Path("printed").write_text(text)
    file = "--neox-config" if framework == "neox" else "--megatron-args"
    words = [file, "printed", "--world-size", 2 if "--world-size 2" in flags else 1]
    assert cli("lock", *words, "--out", "second.lock", "--overwrite")[::2] == (0, "")
    first, second = (read_lock(f"{name}.lock").content for name in ("first", "second"))
    for name in {*first["subsets"], *second["subsets"]}:
        for field in ("samples", "index", "steps", "receipts"):
            assert first["subsets"][name][field] == second["subsets"][name][field], field
    other = {"neox": "megatron", "megatron": "neox"}[framework]
    assert "does not run order" in cli("plan", "--lock", "first.lock", "--print-config", other)[2]


@pytest.mark.parametrize(("field", "value"), [("iterations", 3), ("interval", 5)])
def test_settings_of_other_samples_are_not_printed(field: str, value: int) -> None:
    """Of a subset that is evaluated, too."""
    content = copy.deepcopy(read_lock("neox.lock").content)
    content["settings"]["run"]["evaluation"][field] = value
    Path("edited.lock").write_bytes(lock_text(content))
    assert "resolved subsets.valid" in " ".join(rules("edited.lock", whole=True))
    said = cli("plan", "--lock", "edited.lock", "--print-config", "neox")
    assert (said[0], said[1], "subsets.valid" in said[2]) == (2, "", True), said


@for_each(
    ("words", "message"),
    [
        (["--lock", "skips.lock", "--print-config", "megatron"], "has no setting for skips"),
        (["--lock", "recipe.lock", "--print-config", "neox"], "recipe"),
        (["--recipe", "run.yaml", "--print-config", "neox"], "recipe"),
        (["--lock", "neox.lock", "--seed", "3"], "--seed"),
        (["--lock", "neox.lock", "--recipe", "run.yaml"], "--recipe"),
        (["--lock", "neox.lock", "--skip-steps", "3"], "--skip-steps"),
    ],
)
def test_a_lock_that_is_not_planned_as_asked(words: list[str], message: str) -> None:
    status, out, said = cli("plan", *words)
    assert (status, out, message in said) == (2, "", True), said


def test_an_edited_end_of_a_run_is_a_finding() -> None:
    content = copy.deepcopy(read_lock("skips.lock").content)
    content["subsets"]["train"]["index"]["end"] += 400
    Path("edited.lock").write_bytes(lock_text(content))
    assert rules("edited.lock", whole=True) == ["edited.lock lock"]
    Path("edited.lock").write_bytes(Path("skips.lock").read_bytes()[:900])
    assert "edited.lock: is not a lock" in cli("prove", "skips.lock", "edited.lock")[2]


def test_diff_order_compares_two_locks() -> None:
    shown = json.loads(cli("diff-order", "neox.lock", "neox.lock", "--json")[1])
    assert (shown["relation"], shown["num_samples"]) == ("equal", [160, 160])
    make_lock(
        data_path="data/web", order="epoch", left_over="carry", sequence_length=32, epochs="2.5",
        global_batch_size=8, seed=2,
    ).write("seed.lock")  # fmt: skip
    status, text, _ = cli("diff-order", "flags.lock", "seed.lock", "--json")
    causes = {cause["setting"]: (cause["a"], cause["b"]) for cause in json.loads(text)["causes"]}
    assert (status, causes) == (1, {"run.seed": (1234, 2)})


def test_the_command_refuses_what_it_would_ignore() -> None:
    assert "already exists" in cli("lock", *RUNS["flags"].split(), "--out", "flags.lock")[2]
    assert "check one lock" in cli("verify", "data/web", "--all")[2]
    assert "exclude each other" in cli("verify", "flags.lock", "--all", "--step", 1)[2]
    assert "must be from 0 to" in cli("verify", "flags.lock", "--step", 10_000)[2]
    assert "is a lock" in cli("inspect", "flags.lock")[2]
    make_lock(read_recipe("run.yaml")).write("bare.lock")
    assert "has no hashes of tokens" in cli("verify", "bare.lock", "--tokens")[2]
    said = cli("verify", "flags.lock", "--tokens", "--lengths", "run.lengths")[2]
    assert "--tokens: run.lengths has lengths alone; leave one of them out" in said
    with pytest.raises(InvalidArgument, match="a recipe has all settings"):
        make_lock(read_recipe("run.yaml"), seed=1)
    shown = json.loads(cli("lock", *RUNS["flags"].split(), "--out", "new.lock", "--json")[1])
    assert shown["digest"] == read_lock("new.lock").content["digest"]
    text = cli("lock", *RUNS["skips"].split(), "--out", "new.lock", "--overwrite")[1]
    assert "  train  68 samples, 17 steps (4 skipped), receipt " in text  # as verify counts
    assert "2 pairs, 72 samples" in cli("verify", "new.lock", "--all")[1]  # and 4 of valid


@pytest.mark.parametrize("shape", [{}, {"sequence_length": 8}], ids=["one length", "two lengths"])
def test_stages_of_many_sources_are_locked_in_columns(
    tmp_path: Path, shape: dict[str, Any]
) -> None:
    names = [f"s{number:02}" for number in range(18)]
    for number, name in enumerate(names):
        write_corpus(tmp_path / name, [40 + number] * 4, np.uint16)
    mixes = {
        "all": dict.fromkeys(names, 1),
        "most": {name: k + 1 for k, name in enumerate(names[:0:-1])},
        "again": {names[0]: {"proportion": 1, "restart": True}} | dict.fromkeys(names[1:], 2),
    }
    stages = {name: {"steps": 9, "mix": mix} for name, mix in mixes.items()}
    stages["most"] |= shape
    content = {"sequence_length": 16, "batch": {"global_batch_size": 8}, "stages": stages}
    content["sources"] = {name: str(tmp_path / name) for name in names}
    (tmp_path / "run.yaml").write_text(json.dumps(content))
    lock = make_lock(read_recipe(tmp_path / "run.yaml")).write(tmp_path / "run.lock")
    locked = lock.content["settings"]["recipe"]["stages"]
    assert [locked[name]["mix"].get("sources", "none") for name in mixes] == [
        None, list(range(17, 0, -1)), "none",
    ]  # fmt: skip
    assert rules(lock.path, whole=True) == []
    read = read_settings(lock, [source.path for source in lock.sources], []).settings
    assert isinstance(read, Recipe)
    assert [[int(stream.proportion or 0) for stream in stage.streams] for stage in read.stages] == [
        [1] * 18, [*range(1, 18)], [1, *[2] * 17],
    ]  # fmt: skip


def test_batches_of_one_stream_whose_weights_change(tmp_path: Path) -> None:
    """A step is verified from the description of the index alone."""
    np.save(tmp_path / "mix.npy", np.array([[8 * 5, 2**29, 2**31 - 2**29]]))
    (tmp_path / "run.yaml").write_text(
        "sequence_length: 32\nbatch: {global_batch_size: 8}\n"
        f"sources: {{web: {Path.cwd()}/data/web, code: {Path.cwd()}/data/code}}\n"
        "stages: {all: {steps: 12, batching: per_stream, mix: {web: 1, code: 1}}}\n"
        "mix_changes: {file: mix.npy, sources: [web, code]}\n"
    )
    lock = make_lock(read_recipe(tmp_path / "run.yaml")).write(tmp_path / "run.lock")
    (stage,) = lock.content["subsets"]["train"]["index"]["stages"]
    assert (stage["rule"], stage["batch"], stage["first"]["batch"]) == ("changed", 8, 8)
    assert [rules(lock.path, step=step) for step in (0, 5, 9)] == [[], [], []]


@pytest.mark.slow
def test_a_thousand_sources_in_ten_stages_fit_into_345_kb(tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus", [40, 50, 60], np.uint16)
    names = [f"common-crawl-{number:04}" for number in range(1000)]
    for name in names:
        for suffix in (".idx", ".bin"):
            os.link(tmp_path / f"corpus{suffix}", tmp_path / f"{name}{suffix}")
    weights = np.random.default_rng(1).integers(10**5, 10**6, (10, 1000)).tolist()
    stages = "".join(
        f"  stage-{number}: {{samples: 3000, mix: {{"
        + ", ".join(f"{n}: {w / 1e6!r}" for n, w in zip(names, row, strict=True))
        + "}}\n"
        for number, row in enumerate(weights)
    )
    (tmp_path / "run.yaml").write_text(
        "sequence_length: 16\nbatch: {global_batch_size: 8}\n"
        f"sources: {{{', '.join(f'{name}: {name}' for name in names)}}}\nstages:\n{stages}"
    )
    recipe = read_recipe(tmp_path / "run.yaml")
    lock: Lock = make_lock(recipe).write(tmp_path / "run.lock")
    assert (tmp_path / "run.lock").stat().st_size <= 345_000
    assert rules(lock.path) == []


def test_a_lock_is_not_written_over_another() -> None:
    lock = read_lock("flags.lock")
    lock.write("kept.lock")
    with pytest.raises(StorageError, match=r"kept\.lock: already exists"):
        lock.write("kept.lock")
    assert lock.write("kept.lock", overwrite=True).content == lock.content


@pytest.mark.parametrize(
    ("place", "found"),
    [(("blocks", 0), "receipt"), (("blocks", 1), ""), (("blocks", 4), "receipt"),
     (("blocks", 8), "receipt"), (("total",), "")],
)  # fmt: skip
def test_a_quick_check_computes_the_first_the_middle_and_the_last_block_and_the_total(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: tuple[Any, ...], found: str
) -> None:
    monkeypatch.setattr("megaindex.lock.make._LEAST_BLOCK", 32)
    path = tmp_path / "many.lock"
    assert cli("lock", *RUNS["flags"].split(), "--out", path)[::2] == (0, "")
    content = read_lock(path).content
    assert len(content["subsets"]["train"]["receipts"]["blocks"]) == 9
    path.write_bytes(lock_text(changed(content, ("subsets", "train", "receipts", *place))))
    expected = [f"{path} {rule} of train" for rule in (found, "total") if rule]
    assert [each for each in rules(path) if each.endswith("train")] == expected
    where = {0: "steps 0 to 3 (samples 0 to 31)", 4: "steps 16 to 19 (samples 128 to 159)",
             8: "steps 32 to 33 (samples 256 to 271)"}  # fmt: skip
    named = [each.where for each in verify_lock(path).findings if each.rule == "receipt of train"]
    assert named == ([where[place[1]]] if found else [])


def test_the_steps_of_receipts_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 4 steps in a run of 34, and behind the 5000 steps of a past."""
    monkeypatch.setattr("megaindex.lock.make._LEAST_BLOCK", 32)
    for name, first, last in (("flags", 0, 33), ("past", 5000, 5011)):
        path = tmp_path / f"{name}.lock"
        assert cli("lock", *RUNS[name].split(), "--out", path)[::2] == (0, "")
        for step, begin, end in (
            (first + 3, first, first + 3),
            (first + 4, first + 4, first + 7),
            (range(first + 3, first + 5), first, first + 7),
            (last, last - (last - first) % 4, last),
        ):
            compared = verify_lock(path, step=step).compared
            assert f"the receipt of steps {begin} to {end}" in compared
        content = read_lock(path).content
        path.write_bytes(lock_text(changed(content, ("subsets", "train", "receipts", "blocks", 1))))
        (found,) = verify_lock(path, step=first + 5).findings
        assert found.where.startswith(f"steps {first + 4} to {first + 7} (samples ")
