"""What the examples of docs/maxtext.md need: run before them."""

from support.corpora import write_pairs

write_pairs(web=300)
