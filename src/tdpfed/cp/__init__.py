"""CP (Kruskal) algebra and fitting, on factors ``(..., I_n, R)`` with any leading client dimensions.

``algebra`` contains the exact operations (compose, unfold, MTTKRP, the gradient), ``fit`` the fitting of factors (ALS),
``plan`` which parameters of a model are factorized and with which ranks. ``layers``, ``attention`` and ``tensorize``
are networks whose weights are factors; ``tucker``, ``tucker_layers`` and ``hadamard`` are the other low-rank forms.
"""

from tdpfed.cp.algebra import (
    check_factors,
    check_rank,
    compose,
    fold,
    khatri_rao,
    mode_dot,
    mttkrp,
    residual_grad,
    unfold,
)
from tdpfed.cp.fit import als, balance, decompose, init_factors

__all__ = [
    "als",
    "balance",
    "check_factors",
    "check_rank",
    "compose",
    "decompose",
    "fold",
    "init_factors",
    "khatri_rao",
    "mode_dot",
    "mttkrp",
    "residual_grad",
    "unfold",
]
