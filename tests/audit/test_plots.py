"""Plots of an audit show its numbers, read by the labels of their axes."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.corpora import write_corpus

from megaindex.audit import Audit, audit, plots, run_of_settings
from megaindex.audit.report import Jump
from megaindex.index.balance import CostModel
from megaindex.settings.run_builder import resolve
from megaindex.settings.settings import Settings

STEPS = 200


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Audit:
    """Three sources of several epochs, one of which is served in few steps."""
    folder, rng = tmp_path_factory.mktemp("plots"), np.random.default_rng(3)
    words: list[str] = []
    for name, weight, size in (("web", 70, 120), ("rare", 1, 3), ("books", 29, 30)):
        write_corpus(folder / name, rng.integers(1, 90, size))
        words += [str(weight), str(folder / name)]
    settings = Settings(
        order="neox", data_path=tuple(words), seq_length=16, global_batch_size=8,
        micro_batch_size=2, data_parallel_size=2, train_samples=str(8 * STEPS),
    )  # fmt: skip
    return audit(run_of_settings(resolve(settings)), cost_model=CostModel(linear=8, attention=1))


Piece = tuple[float, float, float]


def scales(plot: str) -> tuple[Any, Any]:
    """Functions that read a place across in percent, and one in pixels from above."""
    across = re.findall(r'<text x="([\d.]+)%" y="\d+" text-anchor="middle">([\d,]+)<', plot)
    down = re.findall(r'dx="-6" y="([\d.]+)" text-anchor="end">([\d.]+)(%?)<', plot)
    x = [(float(place), float(label.replace(",", ""))) for place, label in across]
    y = [(float(place) - 4, float(label) / (100 if unit else 1)) for place, label, unit in down]

    def scale(ticks: list[tuple[float, float]]) -> Any:
        (a, low), *_, (b, high) = ticks
        return lambda place: low + (place - a) * (high - low) / (b - a)

    return scale(x), scale(y)


def curves(plot: str) -> list[tuple[str, list[Piece], list[Piece]]]:
    """Colour, pieces (begin, end, value) and, of an area, those of its lower line."""
    x, y = scales(plot)
    inner = re.search(r'<svg x="([\d.]+)%" y="(\d+)" width="([\d.]+)%".* viewBox="0 0 1000', plot)
    assert inner is not None
    left, top, width = map(float, inner.groups())
    found = []
    for colour, drawn in re.findall(r'var\(--(\w+)\)" d="([^"]*)"', plot):
        lines = []
        for line in re.split("(?=L)", drawn):
            pieces, across, down = [], 0.0, 0.0
            for letter, numbers in re.findall(r"([MLHV])([\d. -]+)", line):
                if letter == "H":
                    ends = sorted((across, float(numbers)))
                    pieces.append((*(x(left + width * end / 1000) for end in ends), y(top + down)))
                    across = float(numbers)
                elif letter == "V":
                    down = float(numbers)
                else:
                    across, down = map(float, numbers.split())
            lines.append(sorted(pieces))
        found.append((colour, lines[0], lines[-1]))
    return found


def assert_pieces(pieces: list[Piece], bounds: Any, values: Any) -> None:
    """The values between the bounds; there is no piece of a value that is NaN."""
    expected = np.column_stack((bounds[:-1], bounds[1:], values))
    expected = expected[~np.isnan(values)]
    got = np.array(pieces)
    assert got.shape == expected.shape
    np.testing.assert_allclose(got[:, :2], expected[:, :2], atol=5e-4 * bounds[-1])
    np.testing.assert_allclose(got[:, 2], expected[:, 2], atol=5e-4 * np.nanmax(values))


def test_lines_and_areas_by_step(result: Audit) -> None:
    exposure = result.exposure
    bounds = exposure.stretches
    assert bounds.tolist() == list(range(STEPS + 1))
    ((colour, line, _),) = curves(plots.exposure_curve(result))
    assert colour == "all"
    assert_pieces(line, bounds, exposure.curve())
    for plot, counts, colours in (
        (plots.composition(result, exposure.composition, "bad"), exposure.composition, "bad"),
        (plots.exposure_shares(result), exposure.shares, plots.RAMP),
    ):
        areas = curves(plot)
        tops = np.cumsum(counts / counts.sum(axis=1, keepdims=True), axis=1)
        used = np.flatnonzero(counts.sum(axis=0)).max() + 1
        assert [colour for colour, _, _ in areas] == list(colours[:used])
        for k, (_, upper, lower) in enumerate(areas):
            assert_pieces(upper, bounds, tops[:, k])
            assert_pieces(lower, bounds, tops[:, k - 1] if k else np.zeros(STEPS))


def test_lines_by_source_are_of_joined_steps(result: Audit) -> None:
    """Of 20 samples of each source, but at least 20 points; none where a source is not served."""
    exposure = result.exposure
    colours = plots.source_colours(result)
    assert list(colours) == [0, 2, 1]
    for shown, steps in (([0, 2, 1], 10), ([0, 2], 9)):
        lines = curves(plots.exposure_by_source(result, {k: colours[k] for k in shown}))
        assert [colour for colour, _, _ in lines] == [colours[k] for k in shown]
        bounds = np.array([*range(0, STEPS, steps), STEPS])
        for k, (_, line, _) in zip(shown, lines, strict=True):
            served, earlier = (
                np.array([column[a:b, k].sum() for a, b in itertools.pairwise(bounds)])
                for column in (exposure.composition, exposure.source_earlier)
            )
            assert (served == 0).any() == (k == 1)
            values = np.divide(earlier, served, out=np.full(served.size, np.nan), where=served > 0)
            assert_pieces(line, bounds, values)


@pytest.mark.parametrize(("steps", "width"), [(1, "step"), (59, "step"), (120, "2 steps")])
def test_repeats_are_in_at_most_sixty_bins(result: Audit, steps: int, width: str) -> None:
    """Each distance is in one bin; the shares are of all repeats."""
    distances = np.arange(1, steps + 1) ** 2
    exposure = replace(result.exposure, distances=distances)
    plot = plots.repeat_distances(replace(result, exposure=exposure))
    assert f">share of repeated tokens, for each {width}<" in plot
    if steps == 1:
        return
    ((colour, upper, lower),) = curves(plot)
    assert colour == "all"
    bounds = np.arange(0, steps + 1, -(-steps // 60))
    shares = [distances[a:b].sum() / distances.sum() for a, b in itertools.pairwise(bounds)]
    assert_pieces(upper, bounds, shares)
    assert [value for _, _, value in lower] == [pytest.approx(0)] * len(shares)


def test_work_of_rows_and_times_of_steps(result: Audit) -> None:
    model = result.balance
    assert model is not None
    ((_, upper, _),) = curves(plots.work_of_rows(model))
    bounds = 100 * model.work_bounds / model.work_bounds.max()
    assert_pieces(upper, bounds, model.work_rows / model.work_rows.sum())
    in_order, balanced = curves(plots.step_time(result, model))
    for (colour, line, _), values in zip((in_order, balanced), model.step_time.T, strict=True):
        assert colour == ("all" if line is in_order[1] else "balanced")
        assert_pieces(line, model.step_bounds, values)


def test_curves_lie_below_the_top_of_the_axes(result: Audit) -> None:
    """No value is above the frame, by the height of the inner picture."""
    assert result.balance is not None
    for plot in (
        plots.exposure_curve(result),
        plots.exposure_by_source(result, plots.source_colours(result)),
        plots.repeat_distances(result),
        plots.work_of_rows(result.balance),
        plots.step_time(result, result.balance),
    ):
        height = float(re.findall(r'viewBox="0 0 1000 (\d+)"', plot)[0])
        drawn = "".join(re.findall(r' d="([^"]*)"', plot))
        down = [
            float(y) for y in re.findall(r"V([\d.-]+)|[ML][\d.-]+ ([\d.-]+)", drawn) for y in y if y
        ]
        assert 0 < min(down) < 0.2 * height
        assert max(down) <= height


@pytest.mark.parametrize(
    ("epochs", "labelled"), [(6, [1, 2, 3, 4, 5, 6]), (7, [2, 4, 6]), (13, [3, 6, 9, 12])]
)
def test_at_most_six_epochs_are_labelled(result: Audit, epochs: int, labelled: list[int]) -> None:
    """Each epoch has a line at its step."""
    tokens = np.full(STEPS, result.tokens * epochs // STEPS + 1)
    changed = replace(result, exposure=replace(result.exposure, step_tokens=tokens))
    plot = plots.exposure_curve(changed)
    x, _ = scales(plot)
    lines = re.findall(r'<line class="mark" x1="([\d.]+)%"', plot)
    assert len(lines) == len(changed.epoch_steps) == epochs
    np.testing.assert_allclose([x(float(place)) for place in lines], changed.epoch_steps, atol=0.1)
    texts = re.findall(r'<text class="" x="([\d.]+)%"[^>]*>(\d+) ×<', plot)
    assert [int(times) for _, times in texts] == labelled
    assert [place for place, _ in texts] == [lines[times - 1] for times in labelled]


def test_the_six_greatest_jumps_are_marked(result: Audit) -> None:
    """Each at its step, in the middle of its rise."""
    jumps = [Jump(step=25 * k, before=0.1, after=0.1 + 0.2 * k) for k in range(1, 8)]
    plot = plots.exposure_curve(replace(result, jumps=tuple(jumps)))
    x, y = scales(plot)
    circles = re.findall(r'<circle class="jump" cx="([\d.]+)%" cy="([\d.]+)"', plot)
    found = [(x(float(across)), y(float(down))) for across, down in circles]
    expected = [(jump.step, 0.1 + 0.1 * k) for k, jump in enumerate(jumps, 1)][:0:-1]
    np.testing.assert_allclose(found, expected, atol=0.05)
    assert "step 175: 0.10 → 1.50" in plot
