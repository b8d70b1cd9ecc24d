"""Published experiments, their numbers next to ours: the paper's (section VII), and a public benchmark's."""
