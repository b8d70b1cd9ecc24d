"""How exactly a GPU multiplies matrices: in float32, or faster with shortened factors."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch

Precision = Literal["float32", "tf32", "bf16"]


@contextmanager
def arithmetic(precision: Precision) -> Iterator[None]:
    """Multiply in float32, or from ``tf32`` on with factors of 10 bits; numbers in memory stay float32.

    What ``bf16`` shortens beyond that, the model's own layers, its objective sees to.
    """
    products, convolutions = torch.backends.cuda.matmul, torch.backends.cudnn
    before = products.allow_tf32, convolutions.allow_tf32
    products.allow_tf32 = convolutions.allow_tf32 = precision != "float32"
    try:
        yield
    finally:
        products.allow_tf32, convolutions.allow_tf32 = before
