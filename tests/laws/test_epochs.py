"""Training by epochs: every client passes through its own samples, however many it has, as a plain loop would."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_recipes import silent
from test_reference import flat, load, mean_of
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import small
from tdpfed.algorithms import ALGORITHMS, Best, FedAvg, Mocha, PFedMe, TDPFed
from tdpfed.config import load_config
from tdpfed.core.draws import Stream, held_out_sizes, key, length_in_pass
from tdpfed.core.permutation import permute
from tdpfed.core.recipe import Optimizer
from tdpfed.core.state import Turn
from tdpfed.data import Federation
from tdpfed.engine.diagnostics import Diagnostics
from tdpfed.engine.ensemble import Ensemble
from tdpfed.engine.simulation import Simulation
from tdpfed.engine.updates import Updates, as_state, joined
from tdpfed.errors import TDPFedError, each
from tdpfed.fast.cuda_graphs import Graphed
from tdpfed.runs.session import Session
from tdpfed.server.participation import Participation

BATCH = 4
SIZES = (9, 3, 8, 9, 1)  # several of one size, one less than a minibatch, one of whole minibatches
CLIENTS = len(SIZES)


def federation(dtype: torch.dtype = torch.float64, seed: int = 0) -> Federation:
    """Return clients with as many training samples as ``SIZES`` says, and two test samples each."""
    generator = torch.Generator().manual_seed(seed)
    owner = torch.arange(CLIENTS).repeat_interleave(torch.tensor(SIZES) + 2)
    first = torch.cat([torch.arange(size + 2) for size in SIZES])
    y = (torch.arange(len(owner)) + owner) % small.CLASSES
    x = torch.randn(small.CLASSES, *small.SHAPE, generator=generator)[y]
    x = x + 0.7 * torch.randn(len(y), *small.SHAPE, generator=generator)
    data = Federation.from_tensors(x, y, owner, classes=small.CLASSES, dtype=dtype, test_mask=first < 2)
    assert tuple(data.train_size.tolist()) == SIZES
    return data


def loader(data: Federation, client: int, round_: int, passes: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield a client's samples as a data loader does: in a new order for each pass, the last minibatch may be short."""
    x, y, _, _ = data.client(client)
    for number in range(passes):
        order = permute(torch.arange(len(y)), torch.tensor(len(y)), key(0, Stream.BATCH, round_, client, number))
        assert order.sort().values.tolist() == list(range(len(y)))
        for rows in order.split(BATCH):
            yield x[rows], y[rows]


def by_epochs(method: Any, epochs: float) -> Any:
    return replace(method, tau=type(method).tau, epochs=epochs)


@pytest.mark.parametrize("runner", ["batched", "loop"])
@pytest.mark.parametrize(("momentum", "passes"), [(0.0, 1), (0.8, 2)])
def test_epochs_are_a_plain_loop_over_each_clients_own_batches(runner: Any, momentum: float, passes: int) -> None:
    data, method = federation(), FedAvg(epochs=passes, batch_size=BATCH, eta=0.05)
    found = small.train(method, 2, data=data, runner=runner, optimizer=Optimizer(momentum=momentum))
    shared: dict[str, Tensor] = dict(small.mlp().double().named_parameters())
    for round_ in (1, 2):
        trained: list[dict[str, Tensor]] = []
        for client in range(CLIENTS):
            module = load(small.mlp().double(), shared)
            optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=momentum)
            for x, y in loader(data, client, round_, passes):
                optimizer.zero_grad()
                cross_entropy(module(x), y).backward()
                optimizer.step()
            trained.append(dict(module.named_parameters()))
        shared = mean_of(trained, list(SIZES))
    torch.testing.assert_close(found.global_model(), flat(shared), rtol=1e-9, atol=1e-9)


def methods() -> dict[str, Any]:
    every = {name: by_epochs(method, 1.5) for name, method in small.variants().items()}
    return {**every, "best": Best.of(FedAvg(epochs=1.5, batch_size=BATCH), validation=0.3)}


SAMPLE = ("fedavg", "perfedavg", "scaffold", "apfl", "tdpfed run", "best")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in SAMPLE else pytest.mark.slow) for name in methods()]
)
def test_batched_equals_loop(name: str) -> None:
    data = federation() if name != "best" else small.federation()
    runs = [small.train(methods()[name], 2, data=data, runner=runner) for runner in ("batched", "loop")]
    small.assert_close(runs[0], runs[1], 1e-9)
    assert runs[0].minibatch_loss == pytest.approx(runs[1].minibatch_loss, rel=1e-9)


def test_a_linear_model_in_dual_form_sees_each_sample_once() -> None:
    linear = nn.Sequential(nn.Flatten(), nn.Linear(36, small.CLASSES))
    runs = [Simulation(linear, federation(), Mocha(epochs=1, batch_size=BATCH), runner=r) for r in ("batched", "loop")]
    for run in runs:
        run.step()
    small.assert_close(runs[0], runs[1], 1e-9)
    turn, _ = runs[0].next_turn()
    for client, size in enumerate(SIZES):
        runner = runs[0].runner.by_size.of(size)
        positions = runner.extras(replace(turn, clients=turn.clients[client])).positions
        assert positions is not None
        seen = torch.cat([positions(t) for t in range(runner.algorithm.tau)])
        assert seen.sort().values.tolist() == list(range(size))


@pytest.mark.parametrize(("name", "model"), [("fedavg", "dense"), ("fedavg", "conv"), ("tdpfed", "dense")])
def test_any_chunking_equals_none_bit_for_bit(name: str, model: str) -> None:
    data, method = federation(torch.float32), by_epochs(small.variants()[name], 1.5)
    whole = small.train(method, 2, data=data, model=model)
    for chunk in (1, 2, 4):
        assert small.equal(whole, small.train(method, 2, data=data, model=model, chunk=chunk)), chunk


NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def begun(name: str, seed: int = 0, device: str = "cpu", **options: Any) -> Simulation:
    """Start a run; ``best`` holds samples out in its first two rounds, so that all sizes change after them."""
    method = methods()[name]
    data = small.federation(seed=seed) if name == "best" else federation(seed=seed)
    method = replace(method, choose_rounds=2) if name == "best" else method
    return Simulation(small.mlp(seed), data.to(torch.device(device)), method, seed=seed, **options)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NEEDS_GPU)])
def test_seeds_together_equal_seeds_alone(device: str) -> None:
    """On a GPU the clients of one size of all runs are computed together; the third round replays the second."""
    for name in ("fedavg",) if device == "cpu" else SAMPLE:  # on a CPU runs with epochs go one after another
        together, alone = Ensemble([begun(name, n, device) for n in (0, 1)]), [begun(name, n, device) for n in (0, 1)]
        for _ in range(5):
            together.step()
            for one in alone:
                one.step()
        for one, other in zip(together.simulations, alone, strict=True):
            small.assert_close(one, other, 0.0 if device == "cpu" else 1e-6)


@NEEDS_GPU
@pytest.mark.parametrize("options", [{}, {"chunk": 2}, {"participation": Participation(3)}], ids=str)
@pytest.mark.parametrize("name", SAMPLE)
def test_sizes_side_by_side_on_a_gpu_equal_the_cpu(name: str, options: dict[str, Any]) -> None:
    runs = [begun(name, device=device, **options) for device in ("cuda", "cpu")]
    for _ in range(5):
        for run in runs:
            run.step()
    for state, value in small.states(runs[0]).items():
        torch.testing.assert_close(value.cpu(), small.states(runs[1])[state], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", SAMPLE)
def test_what_a_gpu_computes_side_by_side_is_what_a_cpu_computes_size_by_size(name: str) -> None:
    """The same functions without streams, of one run and of three with clients of other sizes in another order."""

    runs = [begun(name, seed) for seed in (0, 1, 2)]
    kept = [torch.tensor([0, 1, 2, 3, 4]), torch.tensor([3, 1]), torch.tensor([4, 2, 0])]
    states, expected, sizes = list[Any](), list[Updates](), list[list[int]]()
    for run, clients in zip(runs, kept, strict=True):
        turn, private = Turn(run.seed, 1, clients), run.own_rows(clients)
        states += [run.broadcast.known, private, as_state(turn)]
        sizes.append(run.runner.sizes(1)[clients].tolist())
        expected.append(run.runner.run(run.broadcast.known, private, turn))
        alone = run.runner.by_size._on_streams(sizes[-1])(*states[-3:])
        for found, part in zip(alone, expected[-1].parts, strict=True):
            small.assert_states_close(found, part, 1e-9)
    whole = joined(expected)
    for found, part in zip(Ensemble(runs)._by_size(sizes)(*states), whole.parts, strict=True):
        small.assert_states_close(found, part, 1e-9)


def test_a_round_of_too_many_minibatches_is_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Simulation(small.mlp(), federation(), FedAvg(epochs=1, batch_size=BATCH))
    assert isinstance(run.runner.by_size._on_streams(list(SIZES)), Graphed)
    monkeypatch.setattr("tdpfed.engine.by_size.MOST_MINIBATCHES", 6)  # sizes 1, 3, 8 and 9 take 1 + 1 + 2 + 3
    assert not isinstance(run.runner.by_size._on_streams(list(SIZES)), Graphed)


def test_steps_are_those_of_the_passes_rounded_and_at_least_one() -> None:
    steps = {
        (epochs, size): FedAvg(epochs=epochs, batch_size=BATCH).of_size(size).tau
        for epochs in (0.01, 0.5, 1, 2.5)
        for size in (1, 4, 9, 16)
    }
    assert [steps[0.01, size] for size in (1, 4, 9, 16)] == [1, 1, 1, 1]
    assert [steps[0.5, size] for size in (1, 4, 9, 16)] == [1, 1, 2, 2]
    assert [steps[1, size] for size in (1, 4, 9, 16)] == [1, 1, 3, 4]
    assert [steps[2.5, size] for size in (1, 4, 9, 16)] == [3, 3, 8, 10]
    assert [length_in_pass(step, 9, BATCH) for step in range(6)] == [4, 4, 1, 4, 4, 1]
    best = Best.of(PFedMe(epochs=2, batch_size=BATCH)).of_size(9)
    assert (best.tau, best.method.tau) == (6, 6)
    assert FedAvg(tau=7).of_size(9) == FedAvg(tau=7)


def test_samples_that_are_held_out_are_not_passed_through() -> None:
    """A client's steps are those of the samples that remain, and none of them is a validation sample."""
    data = small.federation()
    run = small.train(Best.of(FedAvg(epochs=1, batch_size=BATCH), validation=0.5), 0, data=data)
    turn, _ = run.next_turn()
    kept = data.train_size - held_out_sizes(data.train_size, 0.5)
    for client, size in enumerate(kept.tolist()):
        runner = run.runner.by_size.of(size)
        alone = replace(turn, clients=turn.clients[client])
        seen = torch.cat([runner.batches(alone)(t)[0] for t in range(runner.algorithm.tau)]).flatten(1)
        held = runner.extras(alone).validation
        assert held is not None
        assert len(seen) == size
        assert torch.cdist(seen, held(0)[0].flatten(1)).min() > 0


def config(*overrides: str) -> Any:
    quick = [
        "run.rounds=4", "checkpoint.every=2", "data.clients=30", "data.partition=iid", "data.size_skew=1",
        "data.max_samples=100", "model.name=logistic", "algorithm.name=fedavg", "algorithm.epochs=1.5",
    ]  # fmt: skip
    return load_config("digits", [*quick, *overrides])


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    whole, stopped = (Session.begin(config(), tmp_path / name, None) for name in ("whole", "stopped"))
    assert whole.simulation.federation.train_size.unique().numel() > 1
    whole.run(silent)
    for _ in range(3):  # the last checkpoint is of round 2
        stopped.simulation.step()
        stopped.after_round()
    stopped.folder.release()
    resumed = Session.resume(tmp_path / "stopped", None)
    assert resumed.simulation.round == 2
    resumed.run(silent)
    assert small.equal(whole.simulation, resumed.simulation)


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_tau_and_epochs_together_are_refused(name: str) -> None:
    method = ALGORITHMS[name]
    with pytest.raises(TDPFedError) as caught:
        method(tau=7, epochs=2.0)
    assert (caught.value.field, caught.value.value) == ("epochs", 2.0)
    assert method(epochs=2.0).epochs == 2.0


def test_a_configuration_says_once_how_long_clients_train(tmp_path: Path) -> None:
    for given in (["algorithm.tau=20", "algorithm.epochs=1"], ["algorithms.fedavg.epochs=1"]):  # 20 is the default
        with pytest.raises(TDPFedError) as caught:
            load_config("mnist", ["algorithm.name=fedavg", *given])
        assert [error.field for error in each(caught.value)] == [given[-1].partition("=")[0]]
    made = load_config("mnist", ["algorithm.name=fedavg", "algorithm.epochs=1"])  # rather than the preset's tau
    assert made.method == FedAvg(epochs=1.0, eta=0.05)
    assert "tau" not in made.as_dict()["algorithm"]
    file = tmp_path / "own.toml"
    file.write_text("[algorithm]\nname = 'fedavg'\ntau = 3\n[algorithms.fedavg]\nepochs = 2\n")
    assert load_config(str(file)).method == FedAvg(tau=3)


def test_a_resolved_configuration_reads_back(tmp_path: Path) -> None:
    Session.begin(config(), tmp_path / "run", None).folder.release()
    assert load_config(str(tmp_path / "run" / "config.toml")) == config()


def test_what_needs_equal_steps_is_refused() -> None:
    with pytest.raises(TDPFedError) as caught:
        small.train(TDPFed(epochs=1.0), 0, diagnostics=Diagnostics(every=1))
    assert caught.value.field == "algorithm.epochs"
