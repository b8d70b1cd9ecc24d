"""How many CPU threads a computation is worth."""

import torch

ONE_THREAD_PARAMETERS = 500_000
"""Parameters of all clients computed together up to which one thread is best: a second would wait more than compute."""


def threads_for(parameters: int) -> int:
    """Return how many of the process's threads to use for clients of so many parameters in all."""
    return torch.get_num_threads() if parameters > ONE_THREAD_PARAMETERS else 1
