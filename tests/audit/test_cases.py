"""What the frameworks' users reported, as the audit shows it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.command_line import cli

from megaindex import build_index
from megaindex.audit.report import Audit, audit, shares
from megaindex.format import IndexedDataset
from megaindex.plan import make_plan
from megaindex.run.from_settings import run_of_settings
from megaindex.run.run import RunSource, run_of_index
from megaindex.settings.run_builder import resolve
from megaindex.settings.settings import Settings


def audit_of(prefix: Path, order: str, final_epoch: str | None, epochs: str = "3.3") -> Audit:
    settings = Settings(
        order=order, data_path=(str(prefix),), seq_length=8, global_batch_size=4, epochs=epochs,
        separate_final_epoch=final_epoch,
    )  # fmt: skip
    return audit(run_of_settings(resolve(settings)))


@pytest.mark.parametrize("order", ["megatron", "paddlenlp"])
def test_the_loss_falls_where_the_last_epoch_is_shuffled_apart(prefix: Path, order: str) -> None:
    """PaddleNLP issue 9599: three epochs together rise to 2 earlier exposures, the last has 3."""
    result = audit_of(prefix, order, None)
    (jump,) = result.jumps
    samples_before = (3 * result.tokens - 1) // 8
    assert abs(jump.step - samples_before // 4) <= 1
    assert jump.before == pytest.approx(2, abs=0.1)
    assert jump.after == pytest.approx(3, abs=0.02)
    after = result.exposure.mean_earlier[jump.step + 1 :]
    assert after.min() > 2.5
    assert result.exposure.mean_earlier[: jump.step - 1].max() < 2.5


@pytest.mark.parametrize("order", ["megatron", "paddlenlp"])
def test_never_shuffling_it_apart_takes_the_step_away(prefix: Path, order: str) -> None:
    """Four epochs together: an even ramp that has got to 3.3 / 4 of 3 earlier exposures."""
    result = audit_of(prefix, order, "never")
    assert result.jumps == ()
    means = result.exposure.mean_earlier
    ramp = np.arange(means.size) / means.size * 3 * 3.3 / 4
    smooth = np.convolve(means - ramp, np.full(100, 1 / 100), "valid")
    assert np.abs(smooth).max() < 0.25


def test_every_epoch_of_its_own_is_a_step_and_mixed_epochs_are_a_ramp(prefix: Path) -> None:
    """Order epoch: 3 passes jump twice; the same 3 shuffled together jump nowhere."""
    apart = audit_of(prefix, "epoch", None, epochs="3")
    assert [round(jump.after) for jump in apart.jumps] == [1, 2]
    run = ["--data-path", prefix, "--seq-length", 8, "--global-batch-size", 4, "--epochs", 3]
    status, out, _ = cli("audit", *run, "--order", "epoch", "--epochs-mixed", 3, "--json")
    assert status == 0
    assert json.loads(out)["jumps"] == []


def test_one_sample_too_many_mixes_two_epochs(prefix: Path) -> None:
    """GPT-NeoX: one epoch's worth of samples leaves a quarter unseen and serves one twice."""
    dataset = IndexedDataset(str(prefix))
    one = build_index(dataset, sequence_length=8, seed=1, order="neox")
    two = build_index(
        dataset, sequence_length=8, seed=1, order="neox", num_samples=one.num_samples + 1
    )
    assert (one.num_epochs, two.num_epochs) == (1, 2)
    source = RunSource(name="c", sequence_lengths=dataset.sequence_lengths)
    worth = one.num_samples // 4
    result = audit(run_of_index(two, [source], global_batch_size=4, num_steps=worth))
    seen = shares(result.exposure.total.tokens.sum(axis=0))
    assert seen == pytest.approx([0.25, 0.5, 0.25], abs=0.02)
    clean = audit(run_of_index(one, [source], global_batch_size=4))
    assert shares(clean.exposure.total.tokens.sum(axis=0))[1] > 0.998


def test_the_same_on_the_command_line(prefix: Path) -> None:
    run = ["--data-path", prefix, "--seq-length", 8, "--global-batch-size", 4, "--epochs", "3.3"]
    for extra, jumps in (([], 1), (["--separate-final-epoch", "never"], 0)):
        status, out, err = cli("audit", *run, "--order", "paddlenlp", *extra, "--json")
        assert (status, err) == (0, "")
        assert len(json.loads(out)["jumps"]) == jumps
        status, out, _ = cli("audit", *run, "--order", "paddlenlp", *extra)
        assert status == 0
        assert " ".join(out.split()).count("training loss tends to fall there") == jumps


@pytest.mark.parametrize("order", ["megatron", "neox"])
def test_the_audit_agrees_with_the_plan(prefix: Path, order: str) -> None:
    settings = Settings(
        order=order, data_path=(str(prefix),), seq_length=8, global_batch_size=4, epochs="2.3"
    )
    run = resolve(replace(settings, coverage="exact"))
    planned = make_plan(run).datasets[0].coverage
    total = audit(run_of_settings(run)).exposure.total
    assert tuple(shares(total.tokens.sum(axis=0))) == planned.tokens
    assert tuple(shares(total.documents_in_part)) == planned.documents
