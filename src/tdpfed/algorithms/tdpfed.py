"""TDPFed: personalized models held near CP-factorized local models; only their factors are sent (Algorithm 1).

A client minimizes ``f_k(theta) + lam/2 ||theta - [[A]]||^2`` (eq. 2): in each local round ``s`` Nesterov steps on theta
with one minibatch (eq. 14), then ``s_prime`` optimizer steps on the factors with theta fixed (eqs. 16 to 18). The
server averages the factors (AFM, eq. 19) or the composed tensors (ACT, eqs. 20 and 21).
The loop over rounds is in ``engine.simulation``. ``docs/paper.md`` says what the paper leaves open.
"""

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from tdpfed.algorithms.base import Algorithm, Average, Update, hyper
from tdpfed.core.inner import implicit_rate
from tdpfed.core.local import FactorRule, Factors, LocalWork, Near
from tdpfed.core.state import Entries, State, Turn
from tdpfed.cp.plan import FactorPlan
from tdpfed.errors import wrong


class TDPFed(Algorithm):
    """Tensor Decomposition based Personalized Federated Learning, with the paper's MNIST settings as defaults."""

    name = "tdpfed"
    follows = "none"
    has_envelope = True

    compression: float = hyper(2.0, "compression rate the CP ranks are chosen for", above=0)
    ranks: Mapping[str, int] | None = hyper(None, "explicit ranks by parameter pattern, for example {'fc*.weight' = 8}")
    include: tuple[str, ...] = hyper(("*",), "patterns of parameters to factorize")
    exclude: tuple[str, ...] = hyper((), "patterns of parameters to keep dense")
    aggregation: Literal["afm", "act"] = hyper("afm", "average the factor matrices, or the composed tensors")
    lam: float = hyper(12.0, "lambda: how strongly theta is held near the local model", least=0, search=(3.0, 30.0))
    beta: float = hyper(1.0, "step towards the clients' average: 1 is plain averaging, more goes beyond it", above=0)
    s: int = hyper(5, "steps on theta per local round; the largest number if nu is given", least=1, most=10**6)
    nu: float | None = hyper(None, "accuracy: squared gradient norm at which the steps on theta end", above=0)
    s_prime: int = hyper(17, "s': steps on the factors per local round", least=1, most=10**6)
    tau: int = hyper(23, "local rounds (minibatches) per communication round", least=1, most=10**6)
    eta: float = hyper(8e-4, "learning rate of the factors", above=0, most=1e38, rate=True)
    eta_p: float = hyper(0.08, "learning rate of theta", above=0, most=1e38, rate=True)
    momentum: float = hyper(0.5, "Nesterov momentum of theta's steps", least=0, most=1)
    momentum_state: Literal["round", "local-round"] = hyper("local-round", "when the velocity of theta is reset")
    proximal: Literal["explicit", "implicit"] = hyper(
        "explicit", "take lambda's part of a step on theta first, or last"
    )
    optimizer: Literal["adam", "gd", "adagrad", "rmsprop", "als"] = hyper(
        "adam", "optimizer of the factors; als is one damped least-squares sweep instead of the s' steps"
    )
    optimizer_state: Literal["round", "local-round", "run"] = hyper(
        "round", "when the state of the factor optimizer is reset: each communication round, each local round, or never"
    )
    factor_steps: Literal["joint", "alternating"] = hyper("joint", "update all factors of a tensor at once, or in turn")
    als_damping: float = hyper(1.0, "als: how strongly factors are held near their previous value", least=0)
    act_sweeps: int = hyper(5, "ACT: least-squares sweeps that fit the global factors to the averaged tensor", least=1)
    keep_theta: bool = hyper(False, "start a round from the client's own theta instead of the global model")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.rule.check()
        if self.momentum_state == "round" and self.momentum == 0:
            raise wrong("momentum_state", "round", "'local-round' without momentum")

    @cached_property
    def plan(self) -> FactorPlan:
        """Which parameters are factorized, and how."""
        return FactorPlan.of(
            self.layout, self.compression, ranks=self.ranks, include=self.include, exclude=self.exclude
        )

    @property
    def rule(self) -> FactorRule:
        """How the factors are optimized."""
        in_turn = self.factor_steps == "alternating"
        return FactorRule(self.optimizer, self.eta, self.optimizer_state, in_turn, self.als_damping)

    def down(self) -> Entries:
        """AFM sends the factors, ACT the factors and the full tensor."""
        return {"factors": self.plan.factors} | ({"theta": self.plan.dense} if self.aggregation == "act" else {})

    def up(self) -> Entries:
        """Clients send only factors."""
        return {"factors": self.plan.factors}

    def init(self, theta: Tensor, generator: torch.Generator) -> State:
        """Draw factors whose composed entries have the variance of the initial parameters."""
        a = self.plan.init(theta, generator)
        return {"factors": a, "theta": self.plan.compose(a)} if self.aggregation == "act" else {"factors": a}

    def init_private(self, theta: Tensor) -> State:
        """Keep theta, with ``keep_theta`` whether the client has trained, and the optimizer's state."""
        seen = {"seen": theta.new_zeros(1)} if self.keep_theta else {}
        return {"theta": theta, **seen, **self.rule.start(self.plan.factors.size, theta)}

    def update(self, message: State, private: State, local: LocalWork) -> Update:
        """Run ``tau`` local rounds (ClientUpdate in Algorithm 1)."""
        for near, factors in self.local_rounds(message, private, local):  # noqa: B007 - used after the loop
            pass
        seen = {"seen": torch.ones_like(private["seen"])} if self.keep_theta else {}
        return {"theta": near.theta, **seen, **factors.state}, {"factors": factors.value}, {"loss": near.loss}

    def local_rounds(self, message: State, private: State, local: LocalWork) -> Iterator[tuple[Near, Factors]]:
        """Yield theta and the factors after each local round, valid until the next; diagnostics look at each."""
        start, factors = self.global_model(message), local.factors(self.plan, message["factors"], self.rule, private)
        if self.keep_theta:
            start = torch.where(private["seen"] > 0, private["theta"], start)
        theta: Tensor | Near = start
        velocity = torch.zeros_like(start) if self.momentum_state == "round" else None
        lr = implicit_rate(self.eta_p, self.lam) if self.proximal == "implicit" else self.eta_p
        for batch in local.batches():
            theta = near = local.proximal(  # eq. 14; with nu until eq. 15 holds
                theta, batch, anchor=factors.composed, lam=self.lam, lr=lr, momentum=self.momentum, steps=self.s,
                nu=self.nu, velocity=velocity,
            )  # fmt: skip
            factors, velocity = factors.towards(near, self.lam, self.s_prime), near.velocity  # eqs. 16 to 18
            yield near, factors

    def aggregate(self, server: State, uploads: State, average: Average, turn: Turn) -> State:
        """Move the global model towards the clients' average by ``beta``."""
        del uploads, turn
        a = server["factors"]
        if self.aggregation == "afm":  # eq. 19
            return {"factors": (1 - self.beta) * a + self.beta * average("factors")}
        mean = average("factors", through=self.plan.compose)  # eq. 20
        theta = (1 - self.beta) * self.plan.compose(a) + self.beta * mean
        return {"factors": self.plan.refine(a, theta, sweeps=self.act_sweeps), "theta": theta}  # eq. 21

    def center(self, server: State) -> State:
        """Return the broadcast factors, or for ACT the tensors they compose."""
        return {"factors": server["factors"] if self.aggregation == "afm" else self.plan.compose(server["factors"])}

    @property
    def summable(self) -> bool:
        """Whether a sum of uploads is enough: with AFM. ACT composes each upload before it averages them."""
        return self.aggregation == "afm"

    def compression_reached(self) -> tuple[float, float, str] | None:
        """Return the rate asked for, the one reached, and why they differ; None with explicit ranks or patterns."""
        return None if self.ranks or self.exclude else (self.compression, *self.plan.rate_reached())

    def local_model(self, private: State, upload: State) -> Tensor:
        """Return the composed tensorized local model."""
        del private
        return self.plan.compose(upload["factors"])

    def global_model(self, server: State) -> Tensor:
        """Return the composed global model, which ACT stores."""
        return server["theta"] if self.aggregation == "act" else self.plan.compose(server["factors"])
