"""The paper's experiments (section VII): its tables and figures, its numbers next to ours."""
