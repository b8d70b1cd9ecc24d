"""Test settings: property tests draw the same examples in every run and have no deadline."""

import torch
from hypothesis import settings

settings.register_profile("tdpfed", derandomize=True, deadline=None, max_examples=40, database=None)
settings.load_profile("tdpfed")

torch.set_num_threads(1)  # threads do not help with small tensors, and are slow on a busy machine
