"""Paths, mappings, positional reads, atomic publication, and typed errors of the file system."""
