"""The examples of docs/megatron.md run as written."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from support.megatron_blends import build, installed

import megaindex.adapters.megatron as adapter
from megaindex.adapters.megatron.__main__ import main as run_script
from megaindex.cli import main

PAGE = (Path(__file__).parents[2] / "docs/megatron.md").read_text()
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", PAGE, re.DOTALL)
SIZES = (60, 9, 5)


def test_python_blocks(core: Any, corpora: list[str], tmp_path: Path) -> None:
    names: dict[str, Any] = {}
    for language, code in BLOCKS:
        if language == "python":
            exec(code if "import" in code else f"import megaindex.adapters.megatron\n{code}", names)
    assert not adapter.is_installed()  # the last one takes it out
    config = {"blend": (corpora, None), "split": "60,20,20"}
    names["verify"](lambda: build(core, SIZES, tmp_path, **config))


def test_verifying_what_was_written(core: Any, corpora: list[str], tmp_path: Path) -> None:
    [line] = [code.strip() for language, code in BLOCKS if "diff-order" in code]
    config = {"blend": (corpora[3:4], None), "split": "100", "sequence_length": 16}
    build(core, SIZES, tmp_path / "cache-without", **config)
    with installed():
        build(core, SIZES, tmp_path / "cache-with", **config)
    for shown, real in (
        ("my_corpus_text_document", corpora[3]),
        ("2048", "16"),
        ("cache-without", str(tmp_path / "cache-without")),
        ("cache-with ", ""),
    ):
        line = line.replace(shown, real)
    words = shlex.split(line)
    words[-1] = str(tmp_path / "cache-with")
    assert words[0] == "megaindex"
    assert main(words[1:]) == 0


def test_running_a_script(
    core: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As ``python -m megaindex.adapters.megatron -- script.py``, with the samplers of a trainer."""
    package = tmp_path / "megatron/training/datasets"
    package.mkdir(parents=True)
    (package / "data_samplers.py").write_text("class MegatronPretrainingSampler:\n    pass\n")
    script = tmp_path / "train.py"
    script.write_text(
        "import sys, megatron.core\n"
        f"megatron.__path__.append({str(tmp_path / 'megatron')!r})\n"
        "from megatron.core.datasets.gpt_dataset import GPTDataset\n"
        "from megatron.training.datasets.data_samplers import MegatronPretrainingSampler as S\n"
        "assert hasattr(GPTDataset, '__getitems__') and __name__ == '__main__'\n"
        "print(sys.argv[1:], S.__iter__.__module__)\n"
    )
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys.modules["megatron"], "__path__", [*sys.modules["megatron"].__path__])
    settings = ["--variance-buffer", "exact", "--separate-final-epoch", "never"]
    try:
        assert run_script(["--", str(script), "--lr", "1"]) == 0
        printed = capsys.readouterr().out.splitlines()[-1]
        assert printed == "['--lr', '1'] megaindex.adapters.megatron.patches"
        script.write_text("import megaindex.adapters as adapters\nprint(adapters.status())\n")
        assert run_script([*settings, str(script)]) == 0
    finally:
        adapter.uninstall()
    assert ", variance_buffer exact, separate_final_epoch never" in capsys.readouterr().out


def test_words_that_name_no_script(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert run_script([]) == 2
    assert capsys.readouterr().err.startswith("usage: python -m megaindex.adapters.megatron")
    assert run_script(["--variance-buffer", "0.5", "script.py"]) == 2
    assert "must be a number >= 1" in capsys.readouterr().err
    assert not adapter.is_installed()
