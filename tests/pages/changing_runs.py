"""What the examples of docs/changing-runs.md need: run before them."""

from support.corpora import write_pairs

write_pairs(web=700, code=80, math=60)
