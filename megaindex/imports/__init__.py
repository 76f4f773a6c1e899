"""Pairs from the token files of other systems: linked where their bytes allow, copied elsewhere."""
