"""Factors of many clients during a round: packed once, updated in place, unpacked at the end."""

from weakref import ref

import torch
from torch import Tensor

from tdpfed.core.local import KEPT, FactorRule, Factors, Near
from tdpfed.core.optim import Moments, Optimizer
from tdpfed.core.plain import modes_in_turn, select
from tdpfed.core.state import State
from tdpfed.cp.plan import FactorPlan
from tdpfed.fast import optim
from tdpfed.fast.first_layer import LowRankStep
from tdpfed.fast.padded import Workspace
from tdpfed.fast.transposed import Transposed


class FastFactors(Factors):
    """Factors ``(K, Q)`` in a workspace; steps may overwrite them, and the old object then raises an error."""

    def __init__(self, space: Workspace, a: Tensor, rule: FactorRule, moments: Moments | None, taken: int = 0) -> None:
        self._space, self._rule, self._moments, self._taken = space, rule, moments, taken
        self._packed: Tensor | None = a
        self._composed: ref[Tensor] | None = None

    @classmethod
    def start(cls, plan: FactorPlan, a: Tensor, rule: FactorRule, private: State) -> "FastFactors":
        """Pack the factors, and the optimizer state if it is kept between rounds."""
        space = _workspace(plan, a, rule)
        packed = space.pack(a)
        kept = {name: private[name] for name in KEPT if name in private} if rule.restart == "run" else {}
        moments = tuple(
            value.reshape(*packed.shape[:-1], 1).clone() if name == "steps" else space.pack(value).clone()
            for name, value in kept.items()
        )
        return cls(space, packed, rule, moments or None)

    @property
    def _a(self) -> Tensor:
        if self._packed is None:
            raise RuntimeError("factors: overwritten by `towards`; use the object that it returned")
        return self._packed

    @property
    def value(self) -> Tensor:
        """The factors."""
        return self._space.unpack(self._a)

    @property
    def composed(self) -> Tensor:
        """The parameters that the factors compose to."""
        composed = self._space.compose(self._a)
        self._composed = ref(composed)
        return composed

    @property
    def state(self) -> State:
        """The optimizer state that a client keeps."""
        _ = self._a  # raises if the factors, and so the moments, were overwritten
        moments = self._moments if self._rule.restart == "run" else None
        return {
            name: moment.clone() if name == "steps" else self._space.unpack(moment)
            for name, moment in zip(KEPT, moments or (), strict=False)
        }

    def towards(self, near: Near, lam: float, steps: int) -> "FastFactors":
        """Take optimizer steps on ``lam/2 ||theta - [[A]]||^2``."""
        a, rule, space = self._a, self._rule, self._space
        if rule.optimizer == "als":
            moved = space.plan.refine(a, near.theta, sweeps=1, damping=rule.damping)
            return FastFactors(space, moved, rule, None)
        optimizer = optim.adam(rule.lr, counting=rule.restart == "run") if rule.optimizer == "adam" else rule.make()
        fresh = self._moments is None or rule.restart == "local-round"
        moments = optimizer.init(a) if fresh or self._moments is None else self._moments
        taken = 0 if fresh else self._taken
        counts, target = range(taken + 1, taken + steps + 1), space.target(near.theta)
        if isinstance(space, Transposed) and isinstance(optimizer, optim.FastOptimizer):
            known = near.low_rank if isinstance(near.low_rank, LowRankStep) else None
            if known is not None and (known.anchor is not self._composed or known.theta() is not near.theta):
                known = None  # it does not describe theta - compose(a)
            space.move(a, target, known, lam, optimizer.in_place, moments, counts)
            self._packed = None
        else:
            a, moments = self._stepped(a, target, lam, optimizer, moments, counts)
        return FastFactors(space, a, rule, moments, taken + steps)

    def _stepped(
        self,
        a: Tensor,
        target: Tensor,
        lam: float,
        optimizer: Optimizer | optim.FastOptimizer,
        moments: Moments,
        counts: range,
    ) -> tuple[Tensor, Moments]:
        gradient = torch.empty_like(a, memory_format=torch.contiguous_format)  # reused for every step
        for count in counts:
            for turn in modes_in_turn(self._space.outer, a.device) if self._rule.alternating else (None,):
                self._space.residual_grad(a, target, lam, gradient)
                moved, new = optimizer.step(a, gradient, moments, count)
                a, moments = (moved, new) if turn is None else select(turn, (moved, new), (a, moments))
        return a, moments


def _workspace(plan: FactorPlan, a: Tensor, rule: FactorRule) -> Workspace:
    """Return the workspace of the factors; ALS and alternating steps use the unpacked layout."""
    packed = rule.optimizer != "als" and not rule.alternating
    if packed and rule.optimizer == "adam" and a.ndim == 2 and a.device.type == "cpu":
        return Transposed(plan)
    return Workspace(plan, padded=packed and a.device.type in ("cpu", "cuda"), device=a.device.type)
