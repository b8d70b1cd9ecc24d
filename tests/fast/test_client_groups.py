"""Groups of clients side by side: the same bits, and errors and Ctrl-C as if there were no threads."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import small
from tdpfed.algorithms import FedAvg, Local, PFedMe, TDPFed
from tdpfed.engine import runners
from tdpfed.engine.processes import Ranks
from tdpfed.engine.simulation import Simulation
from tdpfed.errors import TDPFedError
from tdpfed.fast.client_groups import Groups, StoppedError

CLIENTS = 20
METHODS = {
    "fedavg": FedAvg(**small.COMMON),
    "pfedme": PFedMe(**small.COMMON, s=2),
    "tdpfed": TDPFed(**{**small.TDPFED, "momentum": 0.0}),
    "tdpfed momentum": TDPFed(**small.TDPFED),
}


@pytest.fixture(autouse=True)
def no_model_is_small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("tdpfed.engine.runners.ONE_THREAD_PARAMETERS", 0)
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def ctrl_c_is_heard() -> Iterator[None]:
    """Also where the tests were started in the background, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def trained(name: str, model: str, threads: int, chunk: int | None = None) -> Simulation:
    torch.set_num_threads(threads)
    data = small.federation(CLIENTS, dtype=torch.float32)
    return small.train(METHODS[name], model=model, data=data, chunk=chunk)


@pytest.mark.parametrize("every", small.EVERY)
@pytest.mark.parametrize("model", small.MODELS)
@pytest.mark.parametrize("name", METHODS)
def test_neither_threads_nor_chunks_change_a_bit(name: str, model: str, every: bool) -> None:
    whole = trained(name, model, 1)
    for threads in (1, 2, 3):
        for size in (-1, *small.places(CLIENTS, every and threads == 2, 5)):
            chunk = size + 1 or None
            assert small.equal(whole, trained(name, model, threads, chunk)), (threads, chunk)


@pytest.mark.parametrize("name", METHODS)
def test_samples_drawn_for_all_are_those_that_chunks_draw_themselves(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    draws = small.watched(monkeypatch, runners, "own_indices")
    whole = trained(name, "dense", 2, 5)
    once = len(draws)
    monkeypatch.setattr(runners, "SAMPLES_DRAWN_TOGETHER", 0)
    assert small.equal(whole, trained(name, "dense", 2, 5))
    assert once < len(draws) - once  # in each round, and in each chunk


def test_each_thread_has_its_share() -> None:
    runner = trained("fedavg", "dense", 1).runner
    torch.set_num_threads(2)
    assert runner.lanes(CLIENTS) == (2, 1)
    assert [rows.stop - rows.start for rows in runner._chunks(CLIENTS)] == [10, 10]
    torch.set_num_threads(8)
    assert runner.lanes(CLIENTS) == (7, 1)
    assert runner.lanes(4) == (2, 4)  # threads that have no clients of their own help within
    assert runner.lanes(1) == (1, 8)


@pytest.mark.parametrize("threads", [1, 2])
def test_what_is_spread_is_done_once_for_every_row_and_side_by_side(threads: int) -> None:
    runner, parts = trained("fedavg", "dense", threads).runner, list[slice]()
    together = threading.Barrier(threads)

    def task(part: slice) -> None:
        parts.append(part)
        together.wait(timeout=20)  # breaks if one waits for the other

    runner.spread(CLIENTS, task)
    assert len(parts) == threads
    assert sorted(row for part in parts for row in range(CLIENTS)[part]) == list(range(CLIENTS))
    parts.clear()
    replace(runner, kind="loop").spread(CLIENTS, parts.append)
    assert parts == [slice(CLIENTS)]


def test_a_share_of_the_clients_is_kept_by_as_many_threads_as_compute_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is all participants that say how many: threads of another number would be started twice a round."""
    shapes, compute = list[tuple[int, int]](), Groups.compute

    def watch(self: Groups, tasks: Any, threads: int, within: int) -> Any:
        shapes.append((threads, within))
        return compute(self, tasks, threads, within)

    monkeypatch.setattr(Groups, "compute", watch)
    monkeypatch.setattr(Ranks, "shared", lambda _, part, __: part)
    torch.set_num_threads(4)
    data = small.federation(CLIENTS, dtype=torch.float32)
    alone = Local(**small.COMMON)  # nothing is sent, so nobody is waited for
    Simulation(small.MODELS["dense"](), data, alone, ranks=Ranks(0, 4)).step()
    assert shapes == [(4, 1), (4, 1)]


def test_threads_follow_inference_mode() -> None:
    with torch.inference_mode():
        one, two = trained("fedavg", "dense", 1), trained("fedavg", "dense", 2)
    assert small.equal(one, two)


def test_few_parameters_are_computed_by_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tdpfed.engine.runners.ONE_THREAD_PARAMETERS", 10**9)
    torch.set_num_threads(4)
    assert trained("fedavg", "dense", 4).runner.lanes(CLIENTS) == (1, 1)


def test_threads_are_as_before() -> None:
    torch.set_num_threads(2)
    inside: list[int] = []
    Groups().compute([lambda: inside.append(torch.get_num_threads())] * 4, 2, 1)
    assert inside == [1] * 4
    assert torch.get_num_threads() == 2


def test_results_come_in_the_order_of_the_tasks() -> None:
    def task(number: int) -> int:
        time.sleep(0.02 * (3 - number))
        return number

    assert Groups().compute([partial(task, number) for number in range(4)], 2, 1) == [0, 1, 2, 3]


def test_the_first_error_stops_the_others() -> None:
    groups, steps = Groups(), [0]

    def fails() -> None:
        raise TDPFedError("no")

    def goes_on() -> None:
        for _ in range(500):
            groups.check()
            steps[0] += 1
            time.sleep(0.01)

    with pytest.raises(TDPFedError, match="no"):
        groups.compute([goes_on, fails, goes_on], 2, 1)
    assert steps[0] < 250
    assert groups.compute([groups.check], 2, 1) == [None]  # and the next round starts afresh
    assert groups.compute([groups.check] * 2, 2, 1) == [None, None]


class Demanding(nn.Module):
    """Works until it is told not to."""

    armed: ClassVar[bool] = False

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(36, small.CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        if self.armed:
            raise TDPFedError("model: not today")
        result: Tensor = self.layer(x.flatten(1))
        return result


def test_an_error_of_the_model_surfaces_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(2)
    data = small.federation(CLIENTS, dtype=torch.float32)
    simulation = Simulation(Demanding(), data, FedAvg(**small.COMMON))
    monkeypatch.setattr(Demanding, "armed", True)
    with pytest.raises(TDPFedError, match="not today"):
        simulation.step()
    assert simulation.round == 0
    assert torch.get_num_threads() == 2


def test_ctrl_c_twice_while_waiting_for_another_thread_leaves_nothing_behind() -> None:
    groups, end = Groups(), threading.Event()

    def slow() -> None:
        if threading.current_thread() is not threading.main_thread():
            end.wait(20)  # as one that is in a long product, and does not look
            groups.check()

    def strike() -> None:
        for _ in range(2):
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.3)
        end.set()

    striking = threading.Thread(target=strike)
    striking.start()
    with pytest.raises(KeyboardInterrupt):
        groups.compute([slow] * 2, 2, 1)
    assert not end.is_set()  # so the second came while it waited
    striking.join()
    assert groups.compute([groups.check], 1, 1) == [None]
    assert groups.compute([groups.check] * 3, 2, 1) == [None] * 3


@pytest.mark.parametrize("failing", ["the asking thread", "another"])
def test_an_error_of_either_thread_stops_the_other(failing: str) -> None:
    groups, met = Groups(), threading.Barrier(2)

    def task() -> None:
        met.wait(5)
        own = threading.current_thread() is threading.main_thread()
        if own == (failing == "the asking thread"):
            raise TDPFedError(failing)
        for _ in range(500):
            groups.check()
            time.sleep(0.01)
        raise AssertionError("it was not stopped")

    with pytest.raises(TDPFedError, match=failing):
        groups.compute([task, task], 2, 1)
    assert groups.compute([groups.check] * 2, 2, 1) == [None, None]


def test_between_groups_one_thread_computes_where_there_is_little_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(2)
    runner = trained("fedavg", "dense", 2).runner
    with runner.around_groups(CLIENTS):
        assert torch.get_num_threads() == 1
        assert runner.lanes(CLIENTS) == (2, 1)  # as many as there are
    assert torch.get_num_threads() == runner.groups.threads == 2
    monkeypatch.setattr("tdpfed.engine.runners.QUIET_PARAMETERS", 0)
    with runner.around_groups(CLIENTS):
        assert torch.get_num_threads() == 2


def test_ctrl_c_stops_the_groups() -> None:
    groups = Groups()

    def long() -> None:
        for _ in range(1000):
            groups.check()
            time.sleep(0.01)

    began = time.perf_counter()
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        groups.compute([long, long, long], 2, 1)
    assert time.perf_counter() - began < 5
    assert groups.compute([groups.check] * 2, 2, 1) == [None, None]
    assert not issubclass(StoppedError, TDPFedError)
