"""Settings of training frameworks, and the run that they describe."""
