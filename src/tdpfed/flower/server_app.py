"""The server half of an app: it opens the run folder, resumes from a checkpoint if there is one, and runs rounds."""

import fcntl
import json
import logging
import os
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from safetensors.torch import save as to_bytes

from tdpfed.algorithms.base import CHOICE
from tdpfed.config import Config, flat, parse_config, to_toml
from tdpfed.config.loading import parse_toml
from tdpfed.config.resume import check_same_run, follows_rounds, settings_by_key
from tdpfed.engine.store import Store
from tdpfed.errors import QuorumError, TDPFedError
from tdpfed.files import read_file, write_errors
from tdpfed.flower.exchange import Exchange
from tdpfed.flower.node import Metrics, Side
from tdpfed.flower.settings import Flower, read_settings
from tdpfed.flower.strategy import RoundResult, Strategy
from tdpfed.flower.task import Task
from tdpfed.runs.checkpoints import Snapshot
from tdpfed.runs.folder import CONFIG, CONFIGURATION, FILES, RunFolder
from tdpfed.runs.journal import Journal
from tdpfed.runs.loggers import Loggers
from tdpfed.runs.summary import Facts, device_name
from tdpfed.server.records import Record, due

SESSION = "flower.json"
ROUNDS = "rounds.jsonl"
GLOBAL = "global.safetensors"
MOST_KEYS = 8
"""Most keys that are listed where two configurations differ."""

LOCK_WAIT = 20.0
"""Seconds to wait for the run folder: after its SuperLink is killed, a server app takes a moment to end."""

log = logging.getLogger("flwr")

NO_CLIENTS = Store({}, 0, "ram")
"""The client rows of a checkpoint: none, because clients keep their own state."""


def server_app(task: Task) -> ServerApp:
    """Return the ServerApp of a task."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        try:
            run_server(task, grid, context.run_config)
        except TDPFedError as error:
            log.error("tdpfed: %s", " ".join(str(error).split()))
            raise error.with_traceback(None) from None  # Flower logs it too; a traceback adds nothing

    return app


def run_server(task: Task, grid: Grid, run_config: Mapping[str, Any]) -> dict[str, Any]:
    """Run a federation to its end, from the start or from the newest checkpoint in its folder."""
    config, flower = read_settings(run_config)
    if flower.insecure:
        log.warning("tdpfed: INSECURE: no TLS, no node authentication; anyone can join, read and change messages")
    with _locked_folder(Path(flower.out).expanduser()) as path:
        server = _Server(task, config, flower, path)
        try:
            server.run(Exchange(grid))
        except BaseException as error:
            server.end(error)
            raise
        return server.end()


@contextmanager
def _locked_folder(path: Path) -> Iterator[Path]:
    """Create the run folder and hold an exclusive lock on it; the folder itself is the lock."""
    with write_errors("flower.out", path):
        path.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDONLY)
    try:
        end = time.monotonic() + LOCK_WAIT
        while not _lock(descriptor):
            if time.monotonic() > end:
                raise TDPFedError(f"flower.out: another server app is running in {str(path)!r}; give another folder")
            time.sleep(0.2)
        yield path
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False


class _Server:
    """A run folder on the server, and the strategy that advances the run."""

    def __init__(self, task: Task, config: Config, flower: Flower, path: Path) -> None:
        torch.set_num_threads(1 if config.run.threads == "auto" else config.run.threads)
        Loggers.check(config)
        side = Side.of(task, config, flower.nodes, torch.device("cpu"))
        self.config, self.path = config, path
        self.journal = Journal(config, self._open())
        run, starts = self._session(flower.nodes)
        self.strategy = Strategy(
            side, flower, run, starts, lambda text: log.info("tdpfed: %s", text), self._write_session
        )
        self._resume()
        self._write_session(self.strategy.starts)

    def _open(self) -> RunFolder:
        """Return a new run folder, or the existing one of a run with the same configuration."""
        if not (self.path / CONFIG).exists():
            return RunFolder.create(self.path, to_toml(self.config))
        folder, before = RunFolder.open(self.path)
        try:
            values = parse_toml(before)
        except TDPFedError as error:
            raise TDPFedError(f"flower.out: {str(self.path / CONFIG)!r} is damaged ({error})") from None
        _check_same(parse_config(values), self.config, self.path)
        return folder

    def _session(self, nodes: int) -> tuple[str, list[int]]:
        """Return the run's identifier on the nodes, and the rounds after which its sessions started."""
        session = str(self.path / SESSION)
        try:
            known = json.loads(read_file(self.path / SESSION, follow=False))
            run, starts, before = str(known["run"]), [*map(int, known["starts"]), 0], int(known["nodes"])
        except FileNotFoundError:
            if self.journal.checkpoints.rounds():
                raise TDPFedError(f"flower.out: {session!r} is missing, which identifies the run") from None
            return secrets.token_hex(8), [0]  # new, or killed before its first round
        except (OSError, ValueError, KeyError, TypeError, RecursionError, OverflowError) as error:
            raise TDPFedError(f"flower.out: {session!r} is damaged ({error})") from None
        if before != nodes:
            raise TDPFedError(
                f"flower.nodes: {nodes} given, must be {before} as in the run in flower.out {str(self.path)!r}"
            )
        return run, starts

    def _write_session(self, starts: Sequence[int]) -> None:
        run, nodes = self.strategy.run, self.strategy.flower.nodes
        known = {"run": run, "starts": starts, "nodes": nodes, "folder": str(self.path.resolve())}
        self.journal.folder.write(SESSION, json.dumps(known) + "\n")

    def _resume(self) -> None:
        checkpoints = self.journal.checkpoints
        found = checkpoints.load()
        if found is not None:
            snapshot, warnings = found
            for name, mine in (("algorithm", self.config.method_name), ("seed", self.config.run.seed)):
                if snapshot.meta.get(name) != mine:
                    raise TDPFedError(f"checkpoint: {name} {snapshot.meta.get(name)!r} saved, must be {mine!r}")
            check_same_run(snapshot.meta.get(CONFIGURATION), self.config, "the checkpoint")
            self.strategy.restore(snapshot.round, snapshot.server, snapshot.meta)
            self.strategy.settled = min(checkpoints.rounds(), default=0)
            for warning in warnings:
                log.warning("tdpfed: %s", warning)
            log.info("tdpfed: resuming from round %d", snapshot.round)
        if self.strategy.round >= self.config.run.rounds:
            raise TDPFedError(
                f"flower.out: the run in {str(self.path)!r} has already completed {self.strategy.round} rounds; "
                "give another folder, or increase run.rounds"
            )
        self.journal.folder.reopen()
        self.journal.rewind(self.strategy.round, ROUNDS, saved=None if found is None else found[0].meta.get(FILES))
        for warning in self.journal.folder.warnings:
            log.warning("tdpfed: %s", warning)

    def run(self, exchange: Exchange) -> None:
        """Advance to the last round."""
        strategy, last = self.strategy, self.config.run.rounds
        strategy.gather(exchange)
        while strategy.round < last:
            began, waited = time.perf_counter(), exchange.waited
            number = strategy.round + 1
            evaluated = due(number, self.config.run.evaluate_every, number == last)
            if not self.config.checkpoint.every:
                strategy.settled = strategy.round  # there is no checkpoint to resume from
            result = strategy.step(exchange, evaluated)
            seconds = time.perf_counter() - began
            self.journal.after_round(
                number,
                last=number == last,
                record=partial(self._record, exchange, result) if evaluated else None,
                refused=result.refused,
                save=self._save,
            )
            own = time.perf_counter() - began - (exchange.waited - waited)
            self._note(result, seconds, time.perf_counter() - began, own)

    def _save(self) -> None:
        server, own = self.strategy.state()
        meta = {
            "algorithm": self.config.method_name, "seed": self.config.run.seed,
            CONFIGURATION: settings_by_key(self.config), FILES: self.journal.folder.sums, **own,
        }  # fmt: skip
        checkpoints = self.journal.checkpoints
        checkpoints.save(Snapshot(self.strategy.round, server, NO_CLIENTS, meta), None)
        self.strategy.settled = min(checkpoints.rounds(), default=0)

    def _record(self, exchange: Exchange, result: RoundResult) -> Record:
        """Evaluate the models after the latest round."""
        strategy, losses = self.strategy, [m["loss"] for m in result.metrics.values() if "loss" in m]
        scores = strategy.evaluate(exchange)

        def share(found: Mapping[int, Metrics], key: str) -> float | None:
            having = [client for client in found if key in found[client]]
            tests = sum(strategy.members[client].tests for client in having)
            return sum(found[client][key] for client in having) / tests if tests else None

        tests = {client: member.tests for client, member in strategy.members.items()}
        right = {client: found.get("personalized_correct") for client, found in scores.items()}
        return Record(
            round=strategy.round,
            minibatch_loss=sum(losses) / len(losses) if losses else None,
            personalized_accuracy=share(scores, "personalized_correct"),
            local_accuracy=share(result.metrics, "local_correct"),
            global_accuracy=share(scores, "global_correct"),
            personalized_loss=share(scores, "personalized_loss"),
            global_loss=share(scores, "global_loss"),
            client_accuracy=[
                correct / tests[client] if (correct := right.get(client)) is not None and tests[client] else None
                for client in range(strategy.flower.nodes)
            ],
            uplink_bytes=strategy.ledger.uplink,
            downlink_bytes=strategy.ledger.downlink,
            participants=len(result.metrics),
            seconds=self.journal.seconds,
            rejected=strategy.ledger.rejected,
            client_choice=_choices(strategy.side.algorithm.candidates, scores, strategy.flower.nodes),
        )

    def _note(self, result: RoundResult, train: float, whole: float, own: float) -> None:
        """Log the round: clients lost and why, bytes, and how the time was spent."""
        clients = [found["seconds"] for found in result.metrics.values() if "seconds" in found]
        line = {
            "round": self.strategy.round, "replies": len(result.metrics), "uplink_bytes": result.uplink,
            "lost": {str(client): reason for client, reason in result.lost.items()},
            "refused": [str(one) for one in result.refused], "seconds": whole, "train_seconds": train,
            "server_seconds": own, "client_seconds": max(clients, default=None),
        }  # fmt: skip
        log.info("tdpfed: round %d of %d: %s", self.strategy.round, self.config.run.rounds, json.dumps(line))
        self.journal.folder.append_lines(ROUNDS, [line])

    def end(self, error: BaseException | None = None) -> dict[str, Any]:
        """Write the global model and the summary of a run that has finished or was stopped by ``error``."""
        strategy, side = self.strategy, self.strategy.side
        shipped = side.algorithm.global_model(strategy.server)
        if shipped is not None:
            tensors = {name: value.contiguous().clone() for name, value in side.objective.state_dict(shipped).items()}
            self.journal.folder.write(GLOBAL, to_bytes(tensors))
        facts = Facts(
            algorithm=side.algorithm.name,
            dataset=self.config.data.name,
            model=self.config.model.name,
            rounds=strategy.round,
            seed=self.config.run.seed,
            clients=strategy.flower.nodes,
            layout=side.objective.layout,
            ledger=strategy.ledger,
            device=f"Flower server, {device_name(torch.device('cpu'))}",
        )
        status = "finished" if error is None else "failed" if isinstance(error, Exception) else "interrupted"
        refused = strategy.refused if isinstance(error, QuorumError) else ()
        reason = None if error is None else str(error) or None
        return self.journal.end(facts, status, refused=refused, seconds=self.journal.seconds, error=reason)


def _choices(names: Sequence[str], scores: Mapping[int, Metrics], nodes: int) -> list[str | None] | None:
    """Return which model each client says that it uses; None if the method offers no choice."""
    if not names:
        return None
    numbers = [scores.get(client, {}).get(CHOICE) for client in range(nodes)]
    return [names[int(n)] if n is not None and 0 <= n < len(names) else None for n in numbers]


def _check_same(before: Config, now: Config, path: Path) -> None:
    """Reject resuming a run with another configuration; only ``run.rounds`` may differ, if nothing follows it."""
    old, new = flat(before.as_dict()), flat(now.as_dict())
    may_differ = () if follows_rounds(now) else ("run.rounds",)
    keys = sorted(old.keys() | new.keys())
    other = [key for key in keys if key not in may_differ and old.get(key) != new.get(key)]
    if not other:
        return
    differences = "; ".join(f"{key}: {new.get(key)!r} given, must be {old.get(key)!r}" for key in other[:MOST_KEYS])
    more = f"; and {len(other) - MOST_KEYS} more" if len(other) > MOST_KEYS else ""
    raise TDPFedError(
        f"{differences}{more}, as in the run in flower.out {str(path)!r}; give another folder for another run"
    )
