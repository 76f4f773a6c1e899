"""What the examples of docs/rows.md need: run before them."""

from support.corpora import write_pairs

write_pairs(web=300, code=80)
