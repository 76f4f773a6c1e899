"""What the examples of docs/nanotron.md need: run before them."""

from support.corpora import write_pairs

write_pairs(web=500, code=60, math=40)
