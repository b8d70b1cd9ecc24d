# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""GPU kernels written in Triton, which is installed with GPU builds of PyTorch.

Each does in one pass over memory what takes PyTorch several. The first axis of a grid, the only one that may be longer
than 65,535, runs over the rows of all clients.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from tdpfed.fast.convolution import Geometry

COLUMNS = 64
"""Columns per program instance; one row of them is one coalesced memory access."""


@triton.jit
def _contracted(
    partial, other, out, U, V, R, k_in, u_in, v_in, k_other, v_other, k_out, ROWS: tl.constexpr, C: tl.constexpr
):
    """``out[k, u, r] = sum_v partial[k, u, v, r] * other[k, v, r]``."""
    columns = tl.program_id(1) * C + tl.arange(0, C)
    u, k = tl.program_id(0) % U, (tl.program_id(0) // U).to(tl.int64)
    total = tl.zeros((ROWS, C), tl.float32)
    for first in range(0, V, ROWS):
        v = first + tl.arange(0, ROWS)
        inside = (v[:, None] < V) & (columns[None, :] < R)
        tile = partial + k * k_in + u * u_in + v[:, None] * v_in + columns[None, :]
        weights = other + k * k_other + v[:, None] * v_other + columns[None, :]
        total += tl.load(tile, inside, 0.0) * tl.load(weights, inside, 0.0)
    tl.store(out + k * k_out + u * R + columns, tl.sum(total, 0), columns < R)


@triton.jit
def _multiplied(a, b, out, rows_a, J, R, k_a, i_a, k_b, j_b, k_out, ROWS: tl.constexpr, C: tl.constexpr):
    """``out[k, i, j, r] = a[k, i, r] * b[k, j, r]``."""
    columns = tl.program_id(1) * C + tl.arange(0, C)
    i, k = tl.program_id(0) % rows_a, (tl.program_id(0) // rows_a).to(tl.int64)
    row = tl.load(a + k * k_a + i * i_a + columns, columns < R, 0.0)
    for first in range(0, J, ROWS):
        j = first + tl.arange(0, ROWS)
        inside = (j[:, None] < J) & (columns[None, :] < R)
        rows = tl.load(b + k * k_b + j[:, None] * j_b + columns[None, :], inside, 0.0)
        tl.store(out + k * k_out + (i * J + j[:, None]) * R + columns[None, :], rows * row[None, :], inside)


@triton.jit
def _differences(a, theta, out, in_a, in_theta, scale, N, k_a, k_theta, k_out, C: tl.constexpr):
    """``out[k, in_a[n]] = scale * (a[k, in_a[n]] - theta[k, in_theta[n]])``."""
    n = tl.program_id(1) * C + tl.arange(0, C)
    k = tl.program_id(0).to(tl.int64)
    at = tl.load(in_a + n, n < N, 0)
    given = tl.load(theta + k * k_theta + tl.load(in_theta + n, n < N, 0), n < N, 0.0)
    tl.store(out + k * k_out + at, scale * (tl.load(a + k * k_a + at, n < N, 0.0) - given), n < N)


def contract(partial: Tensor, other: Tensor, dim: int, out: Tensor | None = None) -> Tensor:
    """Return ``(partial * other).sum(dim)`` without storing the product; ``out`` may be a view of a larger tensor.

    ``partial`` is ``(K, I, J, R)``; ``dim`` is -2 with ``other`` ``(K, 1, J, R)``, or -3 with ``(K, I, 1, R)``.
    """
    k, i, j, rank = partial.shape
    partial, other = partial.contiguous(), other.squeeze(1 if dim == -2 else 2)
    kept, summed, by_kept, by_summed = (i, j, j * rank, rank) if dim == -2 else (j, i, rank, j * rank)
    out = partial.new_empty(k, kept, rank) if out is None else out
    assert out.shape == (k, kept, rank), "out: wrong shape"
    assert out.stride()[1:] == (rank, 1), "out: rows must be contiguous"
    strides = (i * j * rank, by_kept, by_summed, other.stride(0), other.stride(1), out.stride(0))
    rows = min(32, triton.next_power_of_2(summed))
    with torch.cuda.device(partial.device):
        _contracted[(k * kept, triton.cdiv(rank, COLUMNS))](
            partial, other, out, kept, summed, rank, *strides, rows, COLUMNS
        )  # fmt: skip
    return out


def khatri_rao(a: Tensor, b: Tensor) -> Tensor:
    """Return the column-wise Kronecker product ``(K, I J, R)`` of ``(K, I, R)`` and ``(K, J, R)``."""
    k, i, rank = a.shape
    j = b.shape[1]
    out = a.new_empty(k, i * j, rank)
    rows = min(16, triton.next_power_of_2(j))
    with torch.cuda.device(a.device):
        _multiplied[(k * i, triton.cdiv(rank, COLUMNS))](
            a, b, out, i, j, rank, a.stride(0), a.stride(1), b.stride(0), b.stride(1), i * j * rank, rows, COLUMNS
        )  # fmt: skip
    return out


def differences(a: Tensor, theta: Tensor, out: Tensor, in_a: Tensor, in_theta: Tensor, scale: float) -> None:
    """Write ``scale (a - theta)``, at indices ``(N,)`` of flat vectors ``(..., Q)`` and ``(..., P)``, into ``out``."""
    clients = math.prod(a.shape[:-1])
    with torch.cuda.device(a.device):
        _differences[(clients, triton.cdiv(len(in_a), 256))](
            a, theta, out, in_a, in_theta, scale, len(in_a), a.shape[-1], theta.shape[-1], out.shape[-1], 256
        )  # fmt: skip


@triton.jit
def _patches(x, out, H, W, KH, KW, HO, WO, N, sh, sw, ph, pw, dh, dw, b_x, c_x, SIZE: tl.constexpr):
    """``out[(g, c, i, j), (b, p, q)] = x[b, (g, c), p sh + i dh - ph, q sw + j dw - pw]``, 0 outside."""
    n = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    row = tl.program_id(0)
    i, j, channel = row // KW % KH, row % KW, row // (KW * KH)
    b, p, q = n // (HO * WO), n // WO % HO, n % WO
    h, w = p * sh + i * dh - ph, q * sw + j * dw - pw
    inside = (n < N) & (h >= 0) & (h < H) & (w >= 0) & (w < W)
    values = tl.load(x + b.to(tl.int64) * b_x + channel.to(tl.int64) * c_x + h * W + w, inside, 0.0)
    tl.store(out + row.to(tl.int64) * N + n, values, n < N)


@triton.jit
def _put_back(cols, out, H, W, KH, KW, HO, WO, N, sh, sw, ph, pw, dh, dw, b_out, c_out, SIZE: tl.constexpr):
    """The transpose of :func:`_patches`: every pixel is the sum over the patches that contain it."""
    pixel = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    channel = tl.program_id(0).to(tl.int64)
    images = N // (HO * WO)
    b, h, w = pixel // (H * W), pixel // W % H, pixel % W
    total = tl.zeros((SIZE,), tl.float32)
    for i in range(KH):
        for j in range(KW):
            up, left = h + ph - i * dh, w + pw - j * dw
            p, q = up // sh, left // sw
            inside = (b < images) & (up >= 0) & (left >= 0) & (up % sh == 0) & (left % sw == 0) & (p < HO) & (q < WO)
            at = ((channel * KH + i) * KW + j) * N + (b * HO + p) * WO + q
            total += tl.load(cols + at, inside, 0.0).to(tl.float32)
    tl.store(out + b.to(tl.int64) * b_out + channel * c_out + h * W + w, total, b < images)


def patches(x: Tensor, geometry: "Geometry") -> Tensor:
    """Return the input patch of each output position, ``(G, C kh kw, B Ho Wo)``, for ``x`` ``(B, G C, H, W)``."""
    x = x.contiguous()
    channels, n = x.shape[1], geometry.positions * len(x)
    kernel = geometry.kernel[0] * geometry.kernel[1]
    out = x.new_empty(geometry.groups, channels // geometry.groups * kernel, n)
    with torch.cuda.device(x.device):
        _patches[(channels * kernel, triton.cdiv(n, 512))](x, out, *_numbers(x.shape, geometry, n), 512)
    return out


def put_back(cols: Tensor, shape: Sequence[int], geometry: "Geometry") -> Tensor:
    """Return the transpose of :func:`patches`, from ``(G, C kh kw, B Ho Wo)`` to ``shape`` ``(B, G C, H, W)``."""
    out, cols = cols.new_empty(*shape), cols.contiguous()
    with torch.cuda.device(cols.device):
        _put_back[(shape[1], triton.cdiv(shape[0] * shape[2] * shape[3], 512))](
            cols, out, *_numbers(shape, geometry, cols.shape[-1]), 512
        )  # fmt: skip
    return out


def _numbers(shape: Sequence[int], geometry: "Geometry", n: int) -> tuple[int, ...]:
    _, channels, height, width = shape
    return (
        height, width, *geometry.kernel, *geometry.output, n, *geometry.stride,
        *geometry.padding, *geometry.dilation, channels * height * width, height * width,
    )  # fmt: skip
