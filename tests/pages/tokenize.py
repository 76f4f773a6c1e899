"""What the examples of docs/tokenize.md need: run before them."""

import gzip
import json
from pathlib import Path

from support.tokenizing import train_bpe

train_bpe(Path("."), template=True)
texts = ["The keeper counted ships.", "", "The moon read the book.", "Größe und Straße."] * 40
rows = [json.dumps({"text": text, "title": text[:9], "id": i}) for i, text in enumerate(texts)]
Path("corpus.jsonl").write_text("\n".join(rows) + "\n")
Path("damaged.jsonl").write_text(
    "\n".join([*rows[:50], '{"text": "unterminated', *rows[50:]]) + "\n"
)
