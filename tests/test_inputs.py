"""`support.inputs`: a test of many inputs names those that fail."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
from support.inputs import for_each


def test_all_inputs_are_tried_and_those_that_fail_are_named() -> None:
    tried = []

    @for_each("word", ["a", "b"])
    @for_each(("n", "doubled"), [(1, 2), (2, 5), (3, 6)])
    def test(fixture: str, word: str, n: int, doubled: int) -> None:
        tried.append((fixture, word, n))
        if n == 3 and word == "b":
            pytest.fail("did not raise")
        assert 2 * n == doubled

    assert list(inspect.signature(test).parameters) == ["fixture"]
    with pytest.raises(AssertionError) as caught:
        test(fixture="given")
    assert tried == [("given", word, n) for word in "ab" for n in (1, 2, 3)]
    first, *failed = str(caught.value).split("\n")
    assert first == "3 of 6 inputs failed:"
    assert [line.partition(": ")[0] for line in failed] == [
        "word='a', n=2, doubled=5", "word='b', n=2, doubled=5", "word='b', n=3, doubled=6",
    ]  # fmt: skip
    assert failed[2].endswith(": did not raise")


def test_each_input_has_a_folder_and_what_it_sets_is_undone(tmp_path: Path) -> None:
    folders = []

    @for_each("n", [1, 2])
    def test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, n: int) -> None:
        assert Path.cwd() == before
        assert not list(tmp_path.iterdir())
        monkeypatch.chdir(tmp_path)
        folders.append(tmp_path)

    before = Path.cwd()
    test(tmp_path=tmp_path, monkeypatch=pytest.MonkeyPatch())
    assert Path.cwd() == before
    assert folders == [tmp_path / "0", tmp_path / "1"]


def test_a_skip_is_no_failure() -> None:
    @for_each("n", [1])
    def test(n: int) -> None:
        pytest.skip(str(n))

    with pytest.raises(pytest.skip.Exception, match="1"):
        test()


def test_names_that_a_test_does_not_take_are_refused() -> None:
    with pytest.raises(AssertionError, match="takes other"):

        @for_each("other", [1])
        def test(n: int) -> None: ...
