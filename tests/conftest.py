"""Property tests draw the same examples on every run, however slow the machine."""

import torch
from hypothesis import settings

settings.register_profile("tdpfed", derandomize=True, deadline=None, max_examples=40, database=None)
settings.load_profile("tdpfed")

torch.set_num_threads(1)  # small tensors gain nothing from threads, and lose much on a busy machine
