"""The comparison of speed-ups with those of an earlier version."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import baseline


@pytest.mark.parametrize(
    ("ratio", "line"),
    [
        (10.0, None),
        (8.1, None),
        (40.0, None),
        (7.9, "blend: 7.90, 10.00 in the baseline (-21%)"),
        (None, "blend: not measured, 10.00 in the baseline"),
    ],
)
def test_a_speed_up_that_fell_is_printed(
    ratio: float | None,
    line: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    report, earlier = tmp_path / "report.json", tmp_path / "baseline.json"
    rows = [] if ratio is None else [{"what": "blend", "ratio_of_least": ratio}]
    report.write_text(json.dumps({"rows": [*rows, {"what": "new", "ratio_of_least": 1.0}]}))
    earlier.write_text(json.dumps({"blend": 10.0}))
    monkeypatch.setattr(baseline, "BASELINE", earlier)
    monkeypatch.setattr(sys, "argv", ["baseline", str(report)])
    assert baseline.main() == (0 if line is None else 1)
    assert (line or "no speed-up fell") in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["baseline", str(report), "--write"])
    assert baseline.main() == 0
    monkeypatch.setattr(sys, "argv", ["baseline", str(report)])
    assert baseline.main() == 0
