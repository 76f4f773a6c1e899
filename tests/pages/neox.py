"""What the examples of docs/neox.md need: run before them."""

from support.corpora import write_pairs

write_pairs(web=1500, code=300)
