"""Runs on disk: folders, checkpoints, sessions, grids, loggers."""
