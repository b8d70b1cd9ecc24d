"""Our own GPU kernels against plain PyTorch."""

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("dim", [-2, -3])
@pytest.mark.parametrize(
    "shape", [(4, 7, 9, 569), (1, 1, 1, 1), (3, 256, 9, 64), (33, 40, 5, 3), (70_000, 2, 1, 1), (2, 70_000, 1, 1)]
)
def test_contraction_is_the_sum_of_the_product(shape: tuple[int, ...], dim: int) -> None:
    from tdpfed.fast import kernels

    generator = torch.Generator("cuda").manual_seed(0)
    partial = torch.randn(shape, generator=generator, device="cuda")
    other = torch.randn((*shape[:-3], *((1, shape[-2]) if dim == -2 else (shape[-3], 1)), shape[-1]), device="cuda")
    expected = (partial.double() * other.double()).sum(dim)
    torch.testing.assert_close(kernels.contract(partial, other, dim).double(), expected, rtol=1e-4, atol=1e-4)


def test_khatri_rao_is_the_column_wise_product() -> None:
    from tdpfed.fast import kernels

    flat = torch.randn(3, 1000, device="cuda")
    a, b = flat[:, 10 : 10 + 5 * 70].view(3, 5, 70), flat[:, 400 : 400 + 7 * 70].view(3, 7, 70)
    expected = torch.einsum("kir,kjr->kijr", a, b).reshape(3, 35, 70)
    torch.testing.assert_close(kernels.khatri_rao(a, b), expected)


@pytest.mark.parametrize("padded", [False, True])
def test_gradient_in_float32_is_that_of_the_cpu_in_float64(padded: bool) -> None:
    from tdpfed.cp.plan import FactorPlan
    from tdpfed.fast.padded import Workspace
    from tdpfed.models import build

    plan = FactorPlan.of(build("vgg8", seed=0), 2.0)
    generator = torch.Generator().manual_seed(1)
    a = torch.stack([plan.init(torch.randn(plan.dense.size, generator=generator), generator) for _ in range(2)])
    theta = torch.randn(2, plan.dense.size, generator=generator)
    expected = plan.residual_grad(a.double(), theta.double(), 3.0)
    space = Workspace(plan, padded=padded)
    packed = space.pack(a.cuda())
    ours = space.unpack(space.residual_grad(packed, space.target(theta.cuda()), 3.0)).cpu().double()
    assert (ours - expected).norm() <= 1e-5 * expected.norm()
    biases = plan.factors.slices["conv1.bias"]
    torch.testing.assert_close(ours[:, biases], expected[:, biases], rtol=1e-5, atol=1e-5)


def test_patches_and_their_transpose_of_many_clients() -> None:
    from tdpfed.fast.convolution import Geometry, patches, put_back

    x = torch.randn(2, 30 * 256, 2, 2, device="cuda")  # 30 clients x 256 channels x 9 positions: a long grid
    geometry = Geometry((3, 3), (1, 1), (1, 1), (1, 1), 30, (2, 2))
    cols = patches(x, geometry)
    torch.testing.assert_close(cols.cpu(), patches(x.cpu(), geometry))
    torch.testing.assert_close(put_back(cols, x.shape, geometry).cpu(), put_back(cols.cpu(), x.shape, geometry))
