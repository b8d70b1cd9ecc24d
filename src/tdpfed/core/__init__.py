"""The foundations: layouts of flat vectors, state, random draws, objectives and local work."""
