"""What the examples of docs/trace.md need: run before them."""

import json
from pathlib import Path

for name in ("news", "wiki"):
    rows = [
        json.dumps({"text": f"The {name} of day {i}: " + "the keeper counted ships. " * (i % 9)})
        for i in range(600)
    ]
    Path(f"{name}.jsonl").write_text("\n".join(rows) + "\n")
