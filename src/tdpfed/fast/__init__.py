"""Faster implementations of the local work; only the engine imports them."""
