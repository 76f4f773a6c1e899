"""Access to corpora in object stores through obstore: metadata, byte ranges and local copies."""
