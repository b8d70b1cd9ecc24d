"""TDPFed: personalised models held near CP-factorised local models, of which only the factors travel (Algorithm 1).

A client minimises ``f_k(theta) + lam/2 ||theta - [[A]]||^2`` (eq. 2): in each local round ``s`` Nesterov steps on theta
with one minibatch (eq. 14), then ``s_prime`` optimiser steps on the factors with theta fixed (eqs. 16 to 18). The
server averages the factors (AFM, eq. 19) or the composed tensors (ACT, eqs. 20 and 21).
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from tdpfed.algorithms.base import Algorithm, Batches, Grad, State, Turn, hyper, to_each
from tdpfed.core import optim
from tdpfed.core.layout import Layout
from tdpfed.cp.plan import FactorPlan
from tdpfed.errors import wrong
from tdpfed.fast.factors import Turned, Workspace
from tdpfed.fast.first_layer import Along
from tdpfed.server.robust import Average

KEPT = ("moment0", "moment1", "steps")
"""What clients keep of an optimiser that goes on from round to round, as much of it as there is."""


class LocalRound(NamedTuple):
    """What a local round came to; the factors and the optimiser's state can be had until the next one."""

    theta: Tensor
    factors: Callable[[], Tensor]
    optimizer: Callable[[], State]
    loss: Tensor


@dataclass(frozen=True, kw_only=True)
class TDPFed(Algorithm):
    """Tensor Decomposition based Personalized Federated Learning, with the paper's MNIST settings as defaults."""

    name: ClassVar[str] = "tdpfed"

    compression: float = hyper(2.0, "compression rate the CP ranks are chosen for", above=0)
    ranks: Mapping[str, int] | None = hyper(None, "explicit ranks by parameter pattern, for example {'fc*.weight' = 8}")
    include: tuple[str, ...] = hyper(("*",), "patterns of parameters to factorise")
    exclude: tuple[str, ...] = hyper((), "patterns of parameters to keep dense")
    aggregation: Literal["afm", "act"] = hyper("afm", "average the factor matrices, or the composed tensors")
    lam: float = hyper(12.0, "lambda: how strongly theta is held near the tensorised local model", least=0)
    beta: float = hyper(1.0, "share of the clients' average in the new global model; 1 is plain averaging", above=0)
    s: int = hyper(5, "steps on theta per local round", least=1, most=10**6)
    s_prime: int = hyper(17, "s': steps on the factors per local round", least=1, most=10**6)
    tau: int = hyper(23, "local rounds (minibatches) per communication round", least=1, most=10**6)
    eta: float = hyper(8e-4, "learning rate of the factors", above=0, most=1e38)
    eta_p: float = hyper(0.08, "learning rate of theta", above=0, most=1e38)
    momentum: float = hyper(0.5, "Nesterov momentum of theta's steps", least=0, most=1)
    optimizer: Literal["adam", "gd", "adagrad", "rmsprop", "als"] = hyper(
        "adam", "what moves the factors; als is one damped least-squares sweep in place of the s' steps"
    )
    optimizer_state: Literal["round", "local-round", "run"] = hyper(
        "round", "when the factor optimiser starts afresh: each communication round, each local round, or once in a run"
    )
    factor_steps: Literal["joint", "alternating"] = hyper("joint", "move all factors of a tensor at once, or in turn")
    als_damping: float = hyper(1.0, "als: how strongly factors are held near their previous value", least=0)
    act_sweeps: int = hyper(5, "ACT: least-squares sweeps that fit the global factors to the averaged tensor", least=1)
    keep_theta: bool = hyper(False, "start a round from the client's own theta instead of the global model")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.optimizer == "als" and self.factor_steps == "alternating":
            raise wrong("factor_steps", "alternating", "'joint' with optimizer 'als', which alternates itself")
        if self.optimizer_state == "run" and (self.optimizer == "als" or self.factor_steps == "alternating"):
            raise wrong(
                "optimizer_state", "run", "'round' or 'local-round' with optimizer 'als', which has no state, and with "
                "factor_steps 'alternating', whose state is of the factor in turn",
            )  # fmt: skip

    @cached_property
    def plan(self) -> FactorPlan:
        """Which parameters are factorised, and how."""
        assert self.layout is not None, "bind the algorithm to a model first"
        shapes = dict(zip(self.layout.names, self.layout.shapes, strict=True))
        return FactorPlan.of(
            shapes, self.compression, ranks=self.ranks or {}, include=self.include, exclude=self.exclude
        )

    @property
    def summable(self) -> bool:
        """The server composes each client's tensor in ACT, and only adds factors in AFM."""
        return self.aggregation == "afm"

    def compression_met(self) -> tuple[float, float, str] | None:
        """Ranks are whole and biases stay dense; explicit ranks and exclusions are a choice of their own."""
        if self.ranks or self.exclude:
            return None
        why = "a rank is at least 1, and biases stay dense"
        if not any(self.plan.ranks):
            why = "no parameter has fewer values as factors at this rate, so all stay dense"
        return self.compression, self.plan.compression_rate, why

    @property
    def layouts(self) -> dict[str, Layout | None]:
        """Factors travel, in ACT also the full tensor."""
        return {"factors": self.plan.factors, "theta": self.plan.dense}

    @property
    def uploaded(self) -> tuple[str, ...]:
        """Clients send factors alone."""
        return ("factors",)

    def init(self, theta: Tensor, generator: torch.Generator) -> State:
        """Draw factors whose composed entries vary as the initial parameters do."""
        a = self.plan.init(theta, generator)
        return {"factors": a, "theta": self.plan.compose(a)} if self.aggregation == "act" else {"factors": a}

    def broadcast(self, server: State, turn: Turn) -> State:
        """AFM sends the factors, ACT the factors and the full tensor."""
        return to_each(server, turn)

    def init_private(self, theta: Tensor) -> State:
        """Keep theta, where rounds start from it whether there has been one, and what the optimiser goes on from."""
        kept = {"theta": theta, "seen": theta.new_zeros(1)} if self.keep_theta else {"theta": theta}
        if self.optimizer_state == "run":
            kept |= zip(KEPT, self._rule.init(theta.new_zeros(self.plan.factors.size)), strict=False)
        return kept

    def update(
        self, message: State, private: State, batches: Batches, grad: Grad, turn: Turn
    ) -> tuple[State, State, State]:
        """Run ``tau`` local rounds (ClientUpdate in Algorithm 1)."""
        del turn
        last = deque(self.local_rounds(message, private, batches, grad), maxlen=1).pop()
        seen = {"seen": torch.ones_like(private["seen"])} if self.keep_theta else {}
        return {"theta": last.theta, **seen, **last.optimizer()}, {"factors": last.factors()}, {"loss": last.loss}

    def local_rounds(self, message: State, private: State, batches: Batches, grad: Grad) -> Iterator[LocalRound]:
        """Yield what each local round came to."""
        theta, space = self._full(message), self._workspace(message["factors"])
        a = space.pack(message["factors"])
        if self.keep_theta:
            theta = torch.where(private["seen"] > 0, private["theta"], theta)
        personal = optim.proximal(self.eta_p, self.lam, self.momentum, self.s)
        state = self._continued(private, a, space)
        for t in range(self.tau):
            # Steps may be taken in theta's memory, and what was yielded stays.
            theta, loss, along = personal(grad, optim.own_copy(theta), batches(t), space.compose(a))
            a, state = self._move_factors(a, space.target(theta), along, space, state, t)
            yield LocalRound(theta, partial(space.unpack, a), partial(self._carried, state, private, space), loss)

    def _continued(self, private: State, a: Tensor, space: Workspace) -> "optim.State | None":
        """Return the optimiser's state after a client's last round, packed as ``a`` is; None if it starts afresh."""
        if self.optimizer_state != "run":
            return None
        packed = (
            private[name].reshape(*a.shape[:-1], 1) if name == "steps" else space.pack(private[name])
            for name in KEPT
            if name in private
        )
        return tuple(value.clone() for value in packed)  # steps are taken in place

    def _carried(self, state: "optim.State | None", private: State, space: Workspace) -> State:
        """Return the optimiser's state as clients keep it: nothing, if it starts afresh."""
        if self.optimizer_state != "run" or state is None:
            return {}
        names = (name for name in KEPT if name in private)
        return {
            name: value.reshape(private[name].shape) if name == "steps" else space.unpack(value)
            for name, value in zip(names, state, strict=True)
        }

    @property
    def _rule(self) -> optim.Optimizer:
        """What moves the factors; one that goes on in the next round counts its steps."""
        if self.optimizer == "adam" and self.optimizer_state == "run":
            return optim.adam(self.eta, counting=True)
        return optim.BY_NAME[self.optimizer](self.eta)

    def _move_factors(
        self, a: Tensor, theta: Tensor, along: Along | None, space: Workspace, state: "optim.State | None", t: int
    ) -> tuple[Tensor, "optim.State | None"]:
        """Take ``s_prime`` steps on ``lam/2 ||theta - [[A]]||^2`` in the factors (eqs. 16 to 18)."""
        if self.optimizer == "als":
            return self.plan.refine(a, theta, sweeps=1, damping=self.als_damping), None
        rule = self._rule
        fresh = state is None or self.optimizer_state == "local-round"
        moments = rule.init(a) if fresh or state is None else state
        steps = range(1, self.s_prime + 1) if fresh else range(t * self.s_prime + 1, (t + 1) * self.s_prime + 1)
        if isinstance(space, Turned) and rule.in_place is not None:
            space.move(a, theta, along, self.lam, rule.in_place, moments, steps)
            return a, moments
        room = torch.empty_like(a, memory_format=torch.contiguous_format)  # for every step's gradient
        for step in steps:
            if self.factor_steps == "joint":
                a, moments = rule.step(a, space.residual_grad(a, theta, self.lam, room), moments, step)
                continue
            for turn in self._turns.to(a.device):
                kept = tuple(moment.clone() for moment in moments)
                moved, new = rule.step(a, space.residual_grad(a, theta, self.lam), moments, step)
                a = torch.where(turn, moved, a)
                moments = tuple(torch.where(turn, n, k) for n, k in zip(new, kept, strict=True))
        return a, moments

    def _workspace(self, a: Tensor) -> Workspace:
        """Return where the factors are moved; ALS and alternating steps take them as they are."""
        together = self.optimizer != "als" and self.factor_steps == "joint"
        if together and self.optimizer == "adam" and a.ndim <= 2 and a.device.type == "cpu":
            return Turned(self.plan, single=a.ndim == 1)
        return Workspace(self.plan, padded=together and a.device.type in ("cpu", "cuda"), device=a.device.type)

    @cached_property
    def _turns(self) -> Tensor:
        """Which factors move in each turn of an alternating pass, ``(N, Q)``: mode n of every tensor in turn n."""
        mode = torch.cat(
            [torch.full((size,), n) for size, n in zip(self.plan.factors.sizes, self.plan.modes, strict=True)]
        )
        return torch.stack([mode == n for n in range(int(mode.max()) + 1)])

    def aggregate(self, server: State, uploads: State, weights: Tensor, turn: Turn, average: Average) -> State:
        """Mix the clients' average into the global model with share ``beta``."""
        del turn
        a = server["factors"]
        if self.aggregation == "afm":
            return {"factors": (1 - self.beta) * a + self.beta * average(uploads["factors"], weights)}
        mean = average(self.plan.compose(uploads["factors"]), weights)
        theta = (1 - self.beta) * self.plan.compose(a) + self.beta * mean
        return {"factors": self.plan.refine(a, theta, sweeps=self.act_sweeps), "theta": theta}

    def center(self, server: State) -> Tensor:
        """Return the broadcast factors, or in ACT what they compose to."""
        a = server["factors"]
        return a if self.aggregation == "afm" else self.plan.compose(a)

    def local_model(self, private: State, upload: State) -> Tensor:
        """Return the composed tensorised local model."""
        del private
        return self.plan.compose(upload["factors"])

    def global_model(self, server: State) -> Tensor:
        """Return the composed global model."""
        return self._full(server)

    def _full(self, state: State) -> Tensor:
        return state["theta"] if self.aggregation == "act" else self.plan.compose(state["factors"])
