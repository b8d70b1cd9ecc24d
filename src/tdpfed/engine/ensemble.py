"""Runs of one experiment with different seeds, computed together: seeds are a further batch axis.

Each run remains a separate simulation, with its own data, server and draws. Only the clients' work is merged: a small
run does not fill a GPU, so several runs take little more time than one.
"""

from collections.abc import Callable, Sequence
from functools import cached_property, partial

import torch
from torch import Tensor

from tdpfed.core.local import Batch, Extras
from tdpfed.core.state import State, Turn
from tdpfed.engine.by_size import in_groups, in_order, part_of
from tdpfed.engine.precision import arithmetic
from tdpfed.engine.runners import MIN_CLIENTS, Runner
from tdpfed.engine.simulation import Simulation
from tdpfed.engine.updates import Updates, as_state, rows_of
from tdpfed.errors import TDPFedError
from tdpfed.fast.cuda_graphs import Graphed, Latest
from tdpfed.fast.gpu import side_by_side


class Ensemble:
    """Simulations that advance together; they may differ only in seed, data and initial state."""

    def __init__(self, simulations: Sequence[Simulation]) -> None:
        if not simulations:
            raise TDPFedError("simulations: none given, at least one is needed")
        first = simulations[0]
        for other in simulations:
            if _kind(other) != _kind(first):
                raise TDPFedError(
                    "simulations: must be runs of one algorithm on one device, in one precision and at the same round"
                )
        self.simulations = list(simulations)
        self._one_objective = all(first.objective.computes_as(other.objective) for other in simulations)

    def step(self) -> list[TDPFedError | None]:
        """Advance every simulation by a round; return for each the error that stopped it, or None."""
        turns = [simulation.next_turn()[0] for simulation in self.simulations]
        runner, clients = self.simulations[0].runner, sum(len(turn.clients) for turn in turns)
        on_cpu = not turns[0].clients.is_cuda
        if (
            runner.kind != "batched"
            or not self._one_objective
            or not MIN_CLIENTS <= clients <= (runner.chunk or runner.fitting)
            or (on_cpu and runner.algorithm.epochs is not None)  # there clients of one run fill all threads
            or (on_cpu and runner.lanes(clients) != (1, 1))
        ):
            return [error_of(simulation.step) for simulation in self.simulations]
        states: list[State] = []
        for simulation, turn in zip(self.simulations, turns, strict=True):
            states += [simulation.broadcast.known, simulation.own_rows(turn.clients), as_state(turn)]
        if runner.algorithm.epochs is not None:
            sizes = [self._sizes(n, turn) for n, turn in enumerate(turns)]
            function = self._rounds.of(tuple(map(tuple, sizes)), partial(self._by_size, sizes))
        else:
            function = self._graphed if runner.graphs and not on_cpu else self._computed
        compute = partial(function, *states)
        with arithmetic(runner.precision):
            together = Updates(*(runner.groups.compute([compute], 1, 1)[0] if on_cpu else compute()))
        begin, errors = 0, []
        for simulation, turn in zip(self.simulations, turns, strict=True):
            rows = slice(begin, begin + len(turn.clients))
            parts = (together.private, together.upload, together.metrics)
            # On a CPU the last bit of a product may depend on where in memory its rows begin.
            own = Updates(
                *({name: value[rows].clone() if on_cpu else value[rows] for name, value in p.items()} for p in parts)
            )
            errors.append(error_of(partial(simulation.step, own if len(turn.clients) else None)))
            begin = rows.stop
        return errors

    def _computed(self, *states: State) -> tuple[State, ...]:
        runners = [simulation.runner for simulation in self.simulations]
        return computed_together(runners, states[0::3], states[1::3], [Turn(**place) for place in states[2::3]])

    def _sizes(self, run: int, turn: Turn) -> list[int]:
        sizes: list[int] = self.simulations[run].runner.sizes(int(turn.round))[turn.clients.cpu()].tolist()
        return sizes

    def _by_size(self, sizes: list[list[int]]) -> Callable[..., tuple[State, ...]]:
        """Return the function for clients that pass through all their samples: equal sizes of all runs together."""
        runners = [simulation.runner for simulation in self.simulations]
        device = runners[0].federation.device
        groups, back = in_groups(sizes, device)

        def computed(*states: State) -> tuple[State, ...]:
            servers, private, turns = states[0::3], states[1::3], [Turn(**place) for place in states[2::3]]
            found: list[Updates] = []
            with side_by_side(device) as lane:
                for size, places in groups:
                    with lane():
                        own = [runners[n].by_size.of(size, alike=False) for n, _ in places]
                        rows = [rows_of(private[n], rows) for n, rows in places]
                        parts = [part_of(turns[n], rows) for n, rows in places]
                        found.append(Updates(*computed_together(own, [servers[n] for n, _ in places], rows, parts)))
            return in_order(found, back).parts

        return runners[0].by_size.recorded(computed, groups)

    @cached_property
    def _rounds(self) -> Latest:
        return Latest()

    @cached_property
    def _graphed(self) -> Graphed:
        return Graphed(self._computed)


def computed_together(
    runners: Sequence[Runner], servers: Sequence[State], private: Sequence[State], turns: Sequence[Turn]
) -> tuple[State, ...]:
    """Return the results of the clients of several runs, run after run."""
    first, pairs = runners[0], list(zip(runners, turns, strict=True))
    messages = [first.algorithm.broadcast(server, turn) for server, turn in zip(servers, turns, strict=True)]
    draws = [runner.batches(turn) for runner, turn in pairs]
    seeds = [torch.as_tensor(turn.seed, device=turn.clients.device).expand_as(turn.clients) for turn in turns]
    turn = Turn(torch.cat(seeds), turns[0].round, torch.cat([turn.clients for turn in turns]))
    local = first.local(turn, _concatenated(draws), _together([runner.extras(turn) for runner, turn in pairs]))
    return first.updated(_joined(messages), _joined(private), local)


def _kind(simulation: Simulation) -> tuple[object, ...]:
    """Return what simulations that are computed together must have in common."""
    runner = simulation.runner
    how = runner.precision, runner.kind, runner.optimizer
    return simulation.algorithm, simulation.federation.device, simulation.round, *how


def error_of(action: Callable[[], None]) -> TDPFedError | None:
    """Call ``action`` and return the error it raises, or None."""
    try:
        action()
    except TDPFedError as error:
        return error
    return None


def _joined(states: Sequence[State]) -> State:
    return {name: torch.cat([state[name] for state in states]) for name in states[0]}


def _concatenated(draws: Sequence[Callable[[int], Batch]]) -> Callable[[int], Batch]:
    def batches(step: int) -> Batch:
        parts: list[tuple[Tensor, Tensor]] = [draw(step) for draw in draws]
        return torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])

    return batches


def _together(extras: Sequence[Extras]) -> Extras:
    """Return what the clients of several runs have beside minibatches; None where one run has it not."""
    validation = [one.validation for one in extras if one.validation is not None]
    sizes = [one.held_out for one in extras if one.held_out is not None]
    public = [one.public for one in extras if one.public is not None]
    numbers = [one.positions for one in extras if one.positions is not None]
    return Extras(
        _concatenated(validation) if len(validation) == len(extras) else None,
        torch.cat(sizes) if len(sizes) == len(extras) else None,
        _concatenated(public) if len(public) == len(extras) else None,
        lambda step: torch.cat([found(step) for found in numbers]),
    )
