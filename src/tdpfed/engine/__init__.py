"""The engine: draws, runners, evaluation, diagnostics and the round loop. It runs any algorithm and depends on none."""
