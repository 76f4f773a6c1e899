"""Read-only mappings, atomic publication, and typed errors for what goes wrong on disk."""
