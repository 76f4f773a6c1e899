"""The picture of docs/packing.md: the documents of 12 samples in the orders epoch and packed.

``python docs/packing_sample.py`` writes packing.svg and packing-dark.svg.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from megaindex import IndexedDatasetWriter, build_index

DOCS = Path(__file__).parent
LENGTH, ROWS, WIDTH, HEIGHT, GAP, TOP, LEFT = 512, 12, 300, 10, 4, 26, 8
PALETTES = {
    "packing.svg": {"text": "#1f2937", "whole": ("#2563eb", "#60a5fa"), "cut": "#f59e0b",
                    "padding": "#e5e7eb"},
    "packing-dark.svg": {"text": "#e5e7eb", "whole": ("#3b82f6", "#93c5fd"), "cut": "#fbbf24",
                         "padding": "#374151"},
}  # fmt: skip


def rows_of(prefix: Path, order: str, lengths: np.ndarray) -> Iterator[list[tuple[int, bool]]]:
    """Yield (input tokens, whether it is a whole document) of the spans of each sample."""
    index = build_index(prefix, sequence_length=LENGTH, order=order)
    spans = index.locate(np.arange(ROWS))
    inputs = spans.input_lengths(LENGTH)
    for begin, end in zip(spans.row_splits[:-1], spans.row_splits[1:], strict=True):
        yield [
            (int(inputs[k]), bool(inputs[k] == lengths[spans.document[k]]))
            for k in range(begin, end)
        ]


def picture(rows: dict[str, list[list[tuple[int, bool]]]], palette: dict[str, object]) -> str:
    """Return both orders side by side as SVG."""
    text, cut, padding = palette["text"], palette["cut"], palette["padding"]
    whole = palette["whole"]
    assert isinstance(whole, tuple)
    parts = []
    for column, (title, samples) in enumerate(rows.items()):
        x0 = LEFT + column * (WIDTH + 3 * LEFT)
        parts.append(f'<text x="{x0}" y="16" fill="{text}">{title}</text>')
        for row, spans in enumerate(samples):
            y, at = TOP + row * (HEIGHT + GAP), 0
            parts.append(
                f'<rect x="{x0}" y="{y}" width="{WIDTH}" height="{HEIGHT}" fill="{padding}"/>'
            )
            for number, (size, is_whole) in enumerate(spans):
                colour = whole[number % 2] if is_whole else cut
                x, w = x0 + at * WIDTH / LENGTH, max(0.5, size * WIDTH / LENGTH - 0.8)
                parts.append(
                    f'<rect x="{x:.1f}" y="{y}" width="{w:.1f}" height="{HEIGHT}" fill="{colour}"/>'
                )
                at += size
    bottom = TOP + ROWS * (HEIGHT + GAP) + 18
    key = [("whole document", whole[0]), ("part of a document", cut), ("padding", padding)]
    for number, (label, colour) in enumerate(key):
        x = LEFT + number * 160
        parts.append(f'<rect x="{x}" y="{bottom - 9}" width="10" height="10" fill="{colour}"/>')
        parts.append(f'<text x="{x + 15}" y="{bottom}" fill="{text}">{label}</text>')
    size = f'viewBox="0 0 {2 * WIDTH + 5 * LEFT} {bottom + 8}"'
    style = "font-family='system-ui, sans-serif' font-size='12'"
    title = "Documents of twelve samples, concatenated and cut, and packed whole"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" {size} {style}>'
        f"<title>{title}</title>{''.join(parts)}</svg>\n"
    )


def main() -> None:
    lengths = np.random.default_rng(3).lognormal(4.9, 0.9, 4000).astype(int) + 1
    with tempfile.TemporaryDirectory() as folder:
        prefix = Path(folder) / "sample"
        with IndexedDatasetWriter(prefix, dtype="uint16") as writer:
            for length in lengths:
                writer.add_document(np.zeros(length, np.uint16))
        rows = {
            f"order {order}": list(rows_of(prefix, order, lengths)) for order in ("epoch", "packed")
        }
    for name, palette in PALETTES.items():
        (DOCS / name).write_text(picture(rows, palette))


if __name__ == "__main__":
    main()
