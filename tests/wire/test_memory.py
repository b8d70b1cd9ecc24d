"""What receiving costs: the resident memory of a process, from before a message of 64 MB is there until its verdict.

The kernel's own peak (VmHWM, set back just before) is held against what the message declares: 4 bytes for each of its
values, as the receiver will have them. The message itself counts. What one message frees goes back to the system, so
that the next cannot hide in it.
"""

import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple

import forge
import pytest
import torch

from tdpfed.core.layout import Layout
from tdpfed.wire import Codec, encode

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

SIDE = 4000
LENGTH = SIDE * SIDE
DECLARED = 4 * LENGTH

RECEIVER = """
import sys
from tdpfed.core.layout import Layout
from tdpfed.wire import Expected, Rejected, decode, validate

def resident(field):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(field))

def verdict(data, codec, side, limit):
    want = Expected(
        kind="up", codec=codec, round=1, lengths={"w": side * side}, layouts={"w": Layout.of({"w": (side, side)})},
        clients={0}, samples={0: 1},
    )
    try:
        return validate(decode(data, limit), want)
    except Rejected as error:
        return error.rule

for line in sys.stdin:
    path, codec, side, limit = line.split()
    open("/proc/self/clear_refs", "w").write("5")
    before = resident("VmRSS")
    assert resident("VmHWM") - before < 500_000
    data = open(path, "rb").read()
    arrived = resident("VmHWM")
    said = verdict(data, codec, int(side), int(limit))
    peak = resident("VmHWM")
    print(said if isinstance(said, str) else "accepted", peak - before, peak - arrived, flush=True)
    del data, said
"""


class Cost(NamedTuple):
    """The verdict, the bytes of message and verdict together, and those of the verdict alone."""

    verdict: str
    whole: int
    alone: int


Receive = Callable[..., Cost]


@pytest.fixture(scope="module")
def receive(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Receive]:
    """A process that receives messages, one after the other; a small one of each codec loads its code."""
    path = tmp_path_factory.mktemp("messages") / "message"
    command = [sys.executable, "-c", RECEIVER]
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "1000000"}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        to, back = process.stdin, process.stdout

        def ask(data: bytes, codec: Codec, limit: int | None = None, side: int = SIDE) -> Cost:
            path.write_bytes(data)
            print(path, codec, side, len(data) if limit is None else limit, file=to, flush=True)
            said, whole, alone = back.readline().split()
            return Cost(said, int(whole), int(alone))

        for codec in forge.CODECS:
            assert ask(honest(codec, 200), codec, side=200).verdict == "accepted"
        yield ask
        to.close()
    path.unlink()


def honest(codec: Codec, side: int = SIDE, rows: int | None = None) -> bytes:
    layout = Layout.of({"w": (rows or side, side)})
    values = torch.linspace(-1, 1, layout.size)
    return encode({"w": values}, {"w": layout}, kind="up", round_=1, client=0, samples=1, codec=codec, seed=0)


@pytest.mark.parametrize(("codec", "size"), [("float32", 1.0), ("float16", 1.5), ("bfloat16", 1.5), ("int8", 1.25)])
def test_an_honest_message_needs_less_than_twice_its_declared_size(codec: Codec, size: float, receive: Receive) -> None:
    """The message, and where it is not float32 its values as well."""
    cost = receive(honest(codec), codec)
    assert cost.verdict == "accepted"
    assert size - 0.02 < cost.whole / DECLARED < size + 0.05 < 2


def spoilt(fault: str) -> bytes:
    good = honest("float32")
    header, payload = forge.parts(good)
    match fault:
        case "nan":
            return forge.signed(header, payload[:-4] + torch.tensor([math.nan]).numpy().tobytes())
        case "checksum":
            return good[:-1] + bytes([good[-1] ^ 1])
        case "shape":
            return forge.with_header(honest("float32", rows=SIDE + 1), layout=header["layout"])
        case "codec":
            return honest("float16", rows=2 * SIDE)
        case "payload":
            return forge.signed(header, b"\xff" * 8 + payload)
        case "header":
            return forge.framed(b" " * DECLARED)
        case _:
            return good


@pytest.mark.parametrize("fault", ["nan", "checksum", "shape", "codec", "payload", "header", "size"])
def test_a_hostile_message_costs_nothing_but_itself(fault: str, receive: Receive) -> None:
    cost = receive(spoilt(fault), "float32", DECLARED if fault == "size" else None)
    assert cost.verdict == fault
    assert cost.whole < 1.05 * DECLARED
    assert cost.alone < 2_000_000
