"""Runs whose samples are decided: what plans, locks, audits and loaders ask."""
