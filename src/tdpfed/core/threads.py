"""The number of CPU threads for a computation."""

import torch

ONE_THREAD_PARAMETERS = 500_000
"""Up to this many parameters of all clients together one thread is fastest: a second waits more than it computes."""


def threads_for(parameters: int) -> int:
    """Return the number of threads to use for clients with this many parameters in total."""
    return torch.get_num_threads() if parameters > ONE_THREAD_PARAMETERS else 1
