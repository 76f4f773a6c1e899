"""What the examples of docs/paddlenlp.md need: run before them."""

from support.corpora import write_pairs

write_pairs(corpus=2000)
