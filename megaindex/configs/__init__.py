"""Settings of other training programs, read into one description of a run."""
