"""What a node keeps and never sends, on its own disk: one small folder for each run and client.

A state is a file ``ROUND.safetensors`` below a line with round, session and SHA-256 sum, written under another name,
flushed and renamed. A server that was restarted may ask for rounds again; states from its oldest checkpoint on are
therefore kept, older ones go. A message from before (an older session, or a round that is over) is refused, and a
state that a server has since gone back behind is never used.
"""

import fcntl
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as from_bytes
from safetensors.torch import save as to_bytes
from torch import Tensor, nn

from tdpfed.core.objective import Objective
from tdpfed.core.state import State
from tdpfed.errors import TDPFedError
from tdpfed.files import PART, sync_folder, write_errors, write_file

FORMAT = 2
_NAME = re.compile(r"([0-9]{8,12})\.safetensors")
_RUN = re.compile(r"[0-9a-f]{16}")
_STARTS = re.compile(r"0(,[0-9]{1,10}){0,9999}")


def state_folder(node_config: Mapping[str, Any], run: object, client: int) -> Path:
    """Return where a client keeps what belongs to a run: under the node's ``state-dir``, or the user's state folder."""
    if not isinstance(run, str) or not _RUN.fullmatch(run):
        raise TDPFedError(f"run: {run!r} in a message, must be 16 hexadecimal digits")
    home = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    base = node_config.get("state-dir") or os.environ.get("TDPFED_STATE") or Path(home) / "tdpfed"
    return Path(str(base)).expanduser() / run / f"client-{client}"


def starts_of(value: object) -> tuple[int, ...]:
    """Return the rounds from which the server's sessions went on, as a message has them: ``0,12,30``."""
    if not isinstance(value, str) or not _STARTS.fullmatch(value):
        raise TDPFedError(f"starts: {str(value)[:40]!r} in a message, must be rounds with commas between, 0 first")
    return tuple(int(number) for number in value.split(","))


class PrivateStore:
    """The states of one client in one run; ``starts`` are the rounds from which the server's sessions went on."""

    def __init__(self, folder: Path, starts: Sequence[int] = (0,)) -> None:
        self.folder, self.starts = folder, starts

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Let nobody else read a state and write the next one meanwhile; the folder itself is the lock."""
        with write_errors("state-dir", self.folder):
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            descriptor = os.open(self.folder, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def before(self, round_: int, session: int) -> State | None:
        """Return the client's state before a round, None if it has not trained yet."""
        self._check_time(round_, session)
        return self.upto(round_ - 1)

    def upto(self, round_: int) -> State | None:
        """Return the newest state that is not of a later round than ``round_``, None if there never was one."""
        headers = self._headers()
        found = max((number for number in headers if number <= round_ and self._counts(headers[number])), default=None)
        if found is not None:
            return self._read(found)
        for header in headers.values():
            if header["floor"] and self._limit(header["session"]):
                raise TDPFedError(
                    f"state-dir: the state after round {round_} or before is needed and gone: {str(self.folder)!r} "
                    f"begins with round {min(headers)}; remove that folder to let this client begin anew"
                )
        return None

    def save(self, round_: int, session: int, state: State, settled: int) -> None:
        """Write the state after a round; keep what a server that falls back to round ``settled`` would need."""
        self._check_time(round_, session)
        payload = to_bytes({name: value.detach().cpu().contiguous().clone() for name, value in state.items()})
        old = {number: header for number, header in self._headers().items() if number != round_}
        needed = max(
            (number for number, header in old.items() if number <= settled and self._counts(header)), default=0
        )
        going = [n for n, header in old.items() if n < needed or n > round_ or not self._counts(header)]
        floors = [header["floor"] for header in old.values() if self._limit(header["session"])]
        floor = max([*floors, needed if any(number < needed for number in going) else 0])
        content = _header(round_, session, floor, payload) + b"\n" + payload
        with write_errors("state-dir", self.folder):
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_file(self._path(round_), content, field="state-dir", unique=True)
            for number in going:
                self._path(number).unlink(missing_ok=True)
            for left in self.folder.glob(f"*{PART}"):  # by a process that was killed: nobody else writes here now
                left.unlink(missing_ok=True)
            sync_folder(self.folder)

    def _check_time(self, round_: int, session: int) -> None:
        """Refuse a round that this node has gone past."""
        last = max(((header["session"], number) for number, header in self._headers().items()), default=(0, 0))
        if last > (session, round_):
            raise TDPFedError(
                f"round {round_} of session {session}: this node has gone on to round {last[1]} of session "
                f"{last[0]}; the message is late and left out"
            )

    def _limit(self, session: int) -> float:
        """Return the last round of a session that later ones have not gone back behind."""
        return min(self.starts[session:], default=float("inf"))

    def _counts(self, header: Mapping[str, Any]) -> bool:
        return bool(header["round"] <= self._limit(header["session"]))

    def _headers(self) -> dict[int, dict[str, Any]]:
        return {number: self._header(number) for number in self._rounds()}

    def _header(self, round_: int) -> dict[str, Any]:
        with self._named(round_), self._path(round_).open("rb") as file:
            return _parsed(file.readline(1 << 12).removesuffix(b"\n"), round_)

    def _read(self, round_: int) -> State:
        with self._named(round_):
            line, _, payload = self._path(round_).read_bytes().partition(b"\n")
            if _parsed(line, round_)["sha256"] != hashlib.sha256(payload).hexdigest():
                raise ValueError("its SHA-256 sum is not what was written")
            state: State = from_bytes(payload)
            return state

    @contextmanager
    def _named(self, round_: int) -> Iterator[None]:
        path = str(self._path(round_))
        try:
            yield
        except OSError as error:
            raise TDPFedError(f"state-dir: cannot read {path!r} ({error.strerror})") from None
        except (ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
            raise TDPFedError(
                f"state-dir: {path!r} is damaged ({error}); remove it to go on from the state before it"
            ) from None

    def _rounds(self) -> list[int]:
        try:
            names = os.listdir(self.folder)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise TDPFedError(f"state-dir: cannot read {str(self.folder)!r} ({error.strerror})") from None
        return sorted(int(match[1]) for name in names if (match := _NAME.fullmatch(name)))

    def _path(self, round_: int) -> Path:
        return self.folder / f"{round_:08}.safetensors"


def _header(round_: int, session: int, floor: int, payload: bytes) -> bytes:
    """Return the first line of a file; states before round ``floor`` have been removed."""
    sums = {"sha256": hashlib.sha256(payload).hexdigest(), "format": FORMAT, "round": round_, "session": session}
    return _sealed({**sums, "floor": floor})


def _sealed(values: Mapping[str, Any]) -> bytes:
    check = hashlib.sha256(json.dumps(values).encode()).hexdigest()  # of the line itself
    return json.dumps({**values, "check": check}).encode()


def _parsed(line: bytes, round_: int) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(line)
    if line != _sealed({name: value for name, value in values.items() if name != "check"}):
        raise ValueError("its first line is not what was written")
    if (values["format"], values["round"]) != (FORMAT, round_):
        raise ValueError(f"format {values['format']} and round {values['round']}, must be {FORMAT} and {round_}")
    return values


def load_personalized(folder: Path | str, model: nn.Module) -> dict[str, Tensor]:
    """Return the personalised model in a client's state folder as a ``state_dict`` of ``model``."""
    state = PrivateStore(Path(folder)).upto(10**12)
    objective = Objective.of(model)
    theta = None if state is None else state.get("theta")
    if theta is None or theta.shape != (objective.layout.size,):
        shape = "nothing" if theta is None else f"{tuple(theta.shape)} values"
        raise TDPFedError(f"{str(folder)!r}: holds {shape}, must hold the state of a model of {objective.layout.size}")
    return objective.state_dict(theta.to(torch.float32))
