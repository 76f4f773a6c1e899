"""The scripts and the notebook of examples/ run, and read the samples that they say."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import re
import runpy
import shutil
import socket
import subprocess
import sys
import traceback
import warnings
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from support.notebook import NOTEBOOK, run_cells

import megaindex
from megaindex.lock import make_lock

EXAMPLES = Path(__file__).parents[1] / "examples"
NEEDED = {
    "plain_pytorch": ["torch"],
    "loss_by_source": ["torch"],
    "stateful_dataloader": ["torchdata"],
    "lightning_trainer": ["lightning"],
    "hf_trainer": ["transformers", "accelerate"],
    "accelerate_loop": ["accelerate"],
    "torchtitan_config": ["torchtitan"],
    "automodel_recipe": ["nemo_automodel"],
    "demonstration": ["torch"],
}
APART = ("lightning_trainer", "hf_trainer", "accelerate_loop")  # they set up the whole process


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A corpus of 105 samples of 128 tokens in the working directory, and the lock of an epoch.

    Its documents end with token 256, as `--tokenizer bytes --append-eod` ends them.
    """
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    with megaindex.IndexedDatasetWriter("my_corpus", dtype="uint16") as writer:
        for length in rng.integers(50, 400, 60):
            writer.add_document(np.append(rng.integers(0, 50, length - 1), 256))
    make_lock(
        data_path="my_corpus", order="epoch", sequence_length=128, epochs=1, micro_batch_size=4,
        data_parallel_size=1,
    ).write("run.lock")  # fmt: skip


def run_example(name: str) -> str:
    """Return what an example prints."""
    for module in NEEDED[name]:
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed; make trainers installs it")
    path = str(EXAMPLES / f"{name}.py")
    if name not in APART:
        out = io.StringIO()
        with contextlib.redirect_stdout(out), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torchdata
            runpy.run_path(path, run_name="__main__")
        return out.getvalue()
    return run_python(path)


def run_python(*arguments: str) -> str:
    """Return what a Python process prints."""
    done = subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def loss_of(text: str) -> float:
    found = re.search(r"loss (\d+\.\d+)", text)
    assert found, text
    return float(found[1])


def test_plain_pytorch_and_its_resume(corpus: None) -> None:
    first = run_example("plain_pytorch")
    assert first.startswith("52 steps to sample 208 of 210, loss ")
    assert loss_of(first) < np.log(256)
    again = run_example("plain_pytorch")  # from step 40 on, with the model of that step
    assert again.startswith("12 steps to sample 208 of 210, ")
    assert loss_of(again) == loss_of(first)


def on_two_ranks(name: str) -> list[str]:
    """Return what each of two ranks prints.

    They are started as by torchrun, but are forked, and so import nothing again. Each has one
    thread, because a forked process waits for ever for the others of its parent.
    """
    pytest.importorskip("torch").set_num_threads(1)
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
    children = [_forked_rank(name, rank, port) for rank in range(2)]
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0, 0]
    return [Path(f"rank{rank}.out").read_text() for rank in range(2)]


def _forked_rank(name: str, rank: int, port: int) -> int:
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2"}
        os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
        Path(f"rank{rank}.out").write_text(run_example(name))
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_plain_pytorch_on_two_ranks(corpus: None) -> None:
    for steps in (26, 6):
        for text in on_two_ranks("plain_pytorch"):
            assert text.startswith(f"{steps} steps to sample 208 of 210, loss ")


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_loss_by_source_on_one_and_two_ranks(corpus: None) -> None:
    with megaindex.IndexedDatasetWriter("my_code", dtype="uint16") as writer:
        for length in np.random.default_rng(1).integers(50, 400, 60):
            writer.add_document(np.append(np.arange(length - 1) % 7 + 100, 256))
    lines = run_example("loss_by_source").splitlines()
    assert [line.split()[0] for line in lines] == ["10", "20", "30"]
    assert "".join(on_two_ranks("loss_by_source")).splitlines() == lines
    assert lines[0].split()[1::2] == ["data/loss", "data/loss/my_corpus", "data/loss/my_code"]
    _, corpus_loss, code_loss = map(float, lines[-1].split()[2::2])
    assert code_loss < corpus_loss < np.log(256)  # it repeats seven tokens


@pytest.mark.usefixtures("short_waits")
def test_stateful_dataloader(corpus: None) -> None:
    assert run_example("stateful_dataloader") == "3 and 23 batches, continued: True\n"


def test_lightning_trains_and_resumes(corpus: None) -> None:
    steps = [line for line in run_example("lightning_trainer").splitlines() if "steps" in line]
    assert steps == ["26 steps to sample 104"] * 2


def test_hugging_face_trainer(corpus: None) -> None:
    text = run_example("hf_trainer")
    assert "26 steps, loss" in text
    assert loss_of(text) < np.log(256)


def test_torchtitan(corpus: None) -> None:
    """tests/trainers/ trains with it; without a GPU it says what it needs."""
    if importlib.util.find_spec("torchtitan") is None:
        pytest.skip("torchtitan is not installed; make trainers installs it")
    code = f"import sys; sys.path[:0] = [{str(EXAMPLES)!r}, {str(EXAMPLES.parent / 'tests')!r}]\n"
    code += "import trainers.torchtitan_on_cpu, torchtitan_config\n"
    code += "loader = torchtitan_config.locked().dataloader.build(dp_world_size=1, dp_rank=0, "
    code += "seq_len=128, local_batch_size=4)\nprint(len(list(loader)))\n"
    code += "import torch; torch.cuda.is_available = lambda: False\n"
    code += "try: torchtitan_config.debug()\nexcept SystemExit as stop: print(stop)"
    needs = "torchtitan's Trainer needs a GPU, and PyTorch finds none here"
    assert run_python("-c", code).endswith(f"26\n{needs}\n")


def test_automodel_recipe(corpus: None) -> None:
    if importlib.util.find_spec("nemo_automodel") is None:
        pytest.skip("nemo_automodel is not installed; make trainers installs it")
    code = f"import runpy, sys; sys.path[:0] = [{str(EXAMPLES.parent / 'tests')!r}]\n"
    code += f"import trainers.automodel_on_cpu\nrunpy.run_path({str(EXAMPLES)!r} + "
    code += "'/automodel_recipe.py', run_name='__main__')"
    assert run_python("-c", code).splitlines()[-1] == "26 steps to sample 104"


def test_accelerate_loop(corpus: None) -> None:
    for _ in range(2):  # the second continues after ten steps
        assert "26 steps to sample 104" in run_example("accelerate_loop")


@pytest.mark.slow
def test_demonstration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of its text and rows; it stops where one of its claims does not hold."""
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    program = str(EXAMPLES / "demonstration.py")
    text = run_python(program, "--bytes", "25000", "--rows", "8")
    assert text.count("[holds] ") == 6
    assert "the records differ by exactly their skips, up to sample " in text
    assert "every .bin: no findings" in " ".join(text.split())
    assert ("$ node lock.js verify run.lock" in text) == (shutil.which("node") is not None)
    assert max(map(len, text.splitlines())) <= 80
    for picture in ("passes", "spike"):
        assert ElementTree.parse(f"demonstration/{picture}.svg").getroot().findall("{*}path")


def test_the_notebook_stores_its_outputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``tests/support/notebook.py`` rewrites them."""
    monkeypatch.chdir(tmp_path)
    notebook = json.loads(NOTEBOOK.read_text())
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert run_cells(notebook) == notebook
    printed = NOTEBOOK.read_text()
    plan = megaindex.make_plan(
        data_path="notebook_corpus", order="neox", sequence_length=128, micro_batch_size=2,
        data_parallel_size=4, epochs=1.3,
    )  # fmt: skip
    assert f"train_iters {plan.train_iters}\\n" in printed
    assert "never seen; " in printed
    assert "Choose a whole number of epochs" in printed
    assert (tmp_path / "audit.html").exists()


def test_the_list_names_every_example() -> None:
    listed = (EXAMPLES.parent / "docs/examples.md").read_text()
    for path in (*EXAMPLES.glob("*.py"), *EXAMPLES.glob("*.ipynb")):
        assert f"](../examples/{path.name})" in listed
        assert path.suffix == ".ipynb" or path.stem in NEEDED
