"""Runs: ``simulate``, a whole run in one call; folders, checkpoints, sessions, grids and loggers."""
