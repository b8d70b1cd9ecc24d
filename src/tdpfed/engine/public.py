"""The public sample of a simulated federation: drawn from the training samples of all clients, and counted as sent.

The clients whose samples are drawn send them to the server, which sends the whole sample to every client, once.
"""

from tdpfed.algorithms.base import Algorithm
from tdpfed.core.extras import public_rows
from tdpfed.core.local import Batch
from tdpfed.data.federation import Federation
from tdpfed.errors import wrong

BYTES_PER_VALUE = 4
"""Of an input or a label."""


def public_sample(algorithm: Algorithm, federation: Federation, seed: int) -> Batch | None:
    """Return the inputs and labels that all clients have in common; None if the method asks for none."""
    count, samples = algorithm.public_samples, int(federation.train_size.sum())
    if not count:
        return None
    if count > samples:
        raise wrong("algorithm.public", count, f"at most {samples}, the training samples of all clients")
    rows = public_rows(seed, samples, count, federation.device)
    return federation.x[rows], federation.y[rows]


def sample_bytes(sample: Batch) -> int:
    """Return the bytes of a sample."""
    return BYTES_PER_VALUE * sum(values.numel() for values in sample)
