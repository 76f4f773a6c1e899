"""Import of token files of other systems as pairs, linked if possible, otherwise copied."""
