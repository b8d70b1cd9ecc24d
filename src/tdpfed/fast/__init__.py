"""Everything that is only there for speed; only the engine imports it."""
