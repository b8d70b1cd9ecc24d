"""What everything stands on: layouts of flat vectors, state, draws, objectives, local work."""
