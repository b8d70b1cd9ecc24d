"""Tensors and CP factors, einsum twins and a count of memory, which the tests of both algebras share."""

from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

MODES = "abcde"
Case = tuple[Tensor, list[Tensor]]


def gen(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def draw_case(seed: int, batch: list[int], sizes: list[int], rank: int, dtype: torch.dtype = torch.float64) -> Case:
    generator = gen(seed)
    factors = [torch.randn(*batch, size, rank, dtype=dtype, generator=generator) for size in sizes]
    return torch.randn(*batch, *sizes, dtype=dtype, generator=generator), factors


@st.composite
def cases(draw: st.DrawFn) -> Case:
    sizes = draw(st.lists(st.integers(1, 5), min_size=1, max_size=5))
    batch = draw(st.lists(st.integers(1, 3), max_size=2))
    return draw_case(draw(st.integers(0, 99)), batch, sizes, draw(st.integers(1, 6)))


def twin_compose(factors: list[Tensor]) -> Tensor:
    modes = MODES[: len(factors)]
    return torch.einsum(",".join(f"...{m}z" for m in modes) + f"->...{modes}", *factors)


def twin_grad(theta: Tensor, factors: list[Tensor]) -> list[Tensor]:
    leaves = [factor.detach().clone().requires_grad_() for factor in factors]
    loss = 0.5 * (theta - twin_compose(leaves)).square().sum()
    return list(torch.autograd.grad(loss, leaves))


def relative(x: Tensor, expected: Tensor) -> float:
    assert x.shape == expected.shape
    x, expected = x.detach(), expected.detach()
    return float((x - expected).norm() / expected.norm().clamp_min(1e-30))


class Created(TorchDispatchMode):
    """Keeps every tensor with memory of its own that is made under it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tensors: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        known = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        new = [t for t in tree_leaves(out) if isinstance(t, Tensor) and t.untyped_storage()._cdata not in known]
        self.tensors += new
        return out

    def largest(self, *excluded: Tensor) -> int:
        outputs = {t.untyped_storage()._cdata for t in excluded}
        sizes = [t.untyped_storage().nbytes() for t in self.tensors if t.untyped_storage()._cdata not in outputs]
        return max(sizes, default=0)


KERNELS = [
    (32, 16, 3, 3), (16, 32, 3, 3), (24, 3, 3, 3), (3, 40, 3, 3), (16, 16, 5, 1), (12, 12, 7), (8, 10, 3, 3, 3),
    (20, 1, 3, 3), (1, 20, 3, 3), (18, 18, 1, 1), (40, 40, 6, 6), (4, 4, 15, 15),
]  # fmt: skip
