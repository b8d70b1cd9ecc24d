"""Number of operations in a round of the MLP workload: 20 clients, 23 local steps of 20 samples; a multiply-add is two.

Only matrix products count. A step on theta is the forward pass and the gradients of the weights and of the hidden
layer's outputs; a factor step, towards a matrix of any rank, and a composition are counted as in ``benchmarks/cp.py``.
"""

import math

from tdpfed.cp.plan import FactorPlan
from tdpfed.models import build

CLIENTS, STEPS, BATCH = 20, 23, 20
INNER, FACTOR_STEPS = 5, 17
HIDDEN_TO_OUT = 100 * 10


def operations(method: str) -> int:
    """Return the operations of one communication round."""
    plan = FactorPlan.of(build("dnn", seed=0), 2.0)
    weights = sum(math.prod(shape) for shape in plan.dense.shapes if len(shape) > 1)
    gradient = 2 * BATCH * (2 * weights + HIDDEN_TO_OUT)
    per_step = {"fedavg": gradient, "fedprox": gradient, "ditto": 2 * gradient, "pfedme": INNER * gradient}
    factorized = [(row.shape, row.rank) for row in plan.rows() if row.rank is not None]
    compose = sum(2 * math.prod(shape) * rank for shape, rank in factorized)
    factor_step = sum(4 * math.prod(shape) * rank + 4 * sum(shape) * rank**2 for shape, rank in factorized)
    per_step["tdpfed"] = INNER * gradient + compose + FACTOR_STEPS * factor_step
    return CLIENTS * STEPS * per_step[method]
