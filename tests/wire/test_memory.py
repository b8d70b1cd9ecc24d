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

from tdpfed.algorithms import FedAvg
from tdpfed.core.layout import Layout
from tdpfed.wire import Codec, Wire, encode, whole_parts
from tdpfed.wire.channel import Channel

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

SIDE = 4000
LENGTH = SIDE * SIDE
DECLARED = 4 * LENGTH

LABELS = {**{f"dense {codec}": Wire(codec=codec) for codec in forge.CODECS}, "factors int4": Wire(update="factors")}

RECEIVER = """
import sys
import torch
from tdpfed.algorithms import FedAvg
from tdpfed.core.layout import Layout
from tdpfed.wire import Expected, Rejected, Wire, decode, validate
from tdpfed.wire.channel import Channel

def resident(field):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(field))

def expected(update, codec, side):
    layout = Layout.of({"w": (side, side)})
    channel = Channel(FedAvg().bind(layout, 1), Wire(update=update, codec=codec), 0)
    unchanged = {"w": torch.ones(side * side)} if channel.changes else None
    return Expected(kind="up", round=1, form=channel.form, clients={0}, samples={0: 1}, unchanged=unchanged)

def verdict(data, want, limit):
    try:
        return validate(decode(data, limit), want)
    except Rejected as error:
        return error.rule

for line in sys.stdin:
    path, update, codec, side, limit = line.split()
    want = expected(update, codec, int(side))
    open("/proc/self/clear_refs", "w").write("5")
    before = resident("VmRSS")
    assert resident("VmHWM") - before < 500_000
    data = open(path, "rb").read()
    arrived = resident("VmHWM")
    said = verdict(data, want, int(limit))
    peak = resident("VmHWM")
    print(said if isinstance(said, str) else "accepted", peak - before, peak - arrived, flush=True)
    del data, said, want
"""


class Cost(NamedTuple):
    """The verdict, the bytes of message and verdict together, and those of the verdict alone."""

    verdict: str
    whole: int
    alone: int


Receive = Callable[..., Cost]


@pytest.fixture(scope="module")
def receive(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Receive]:
    """A process that receives messages, one after the other; a small one of each form loads its code."""
    path = tmp_path_factory.mktemp("messages") / "message"
    command = [sys.executable, "-c", RECEIVER]
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "1000000"}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        to, back = process.stdin, process.stdout

        def ask(data: bytes, label: str, limit: int | None = None, side: int = SIDE) -> Cost:
            path.write_bytes(data)
            print(path, *label.split(), side, len(data) if limit is None else limit, file=to, flush=True)
            said, whole, alone = back.readline().split()
            return Cost(said, int(whole), int(alone))

        for label in LABELS:
            assert ask(honest(label, 200), label, side=200).verdict == "accepted"
        yield ask
        to.close()
    path.unlink()


def honest(label: str, side: int = SIDE, rows: int | None = None) -> bytes:
    layout = Layout.of({"w": (rows or side, side)})
    channel = Channel(FedAvg().bind(layout, 1), LABELS[label], 0)
    values = torch.linspace(-1, 1, layout.size)
    if channel.changes:
        kept = {name: value[None] for name, value in channel.start(values).items()}
        parts = [part[0] for part in channel.send({"w": values[None]}, {"w": torch.zeros(1, layout.size)}, kept).parts]
    else:
        parts = whole_parts({"w": values}, channel.form, kind="up", round_=1, client=0, seed=0)
    return encode(parts, channel.form, kind="up", round_=1, client=0, samples=1)


@pytest.mark.parametrize(("codec", "size"), [("float32", 1.0), ("float16", 1.5), ("bfloat16", 1.5), ("int8", 1.25)])
def test_an_honest_message_needs_less_than_twice_its_declared_size(codec: Codec, size: float, receive: Receive) -> None:
    """The message, and where it is not float32 its values as well."""
    cost = receive(honest(f"dense {codec}"), f"dense {codec}")
    assert cost.verdict == "accepted"
    assert size - 0.02 < cost.whole / DECLARED < size + 0.05 < 2


def test_a_factored_message_needs_the_composed_change_and_the_entry(receive: Receive) -> None:
    """16 kB declare a change of 64 MB: it is composed once, and added to what the client received."""
    data = honest("factors int4")
    assert len(data) < DECLARED / 3000
    cost = receive(data, "factors int4")
    assert cost.verdict == "accepted"
    assert 1.98 < cost.whole / DECLARED < 2.1


def spoilt(fault: str) -> bytes:
    good = honest("dense float32")
    header, payload = forge.parts(good)
    match fault:
        case "nan":
            return forge.signed(header, payload[:-4] + forge.number("float32", math.nan))
        case "checksum":
            return good[:-1] + bytes([good[-1] ^ 1])
        case "payload":
            return forge.with_header(honest("dense float32", rows=SIDE + 1), hash=header["hash"])
        case "codec":
            return honest("dense float16", rows=2 * SIDE)
        case "layout":
            return honest("dense float32", rows=SIDE + 1)
        case "header":
            return forge.signed(header | {"kind": 9}, payload)
        case _:
            return good


@pytest.mark.parametrize("fault", ["nan", "checksum", "payload", "codec", "layout", "header", "size"])
def test_a_hostile_message_costs_nothing_but_itself(fault: str, receive: Receive) -> None:
    cost = receive(spoilt(fault), "dense float32", DECLARED if fault == "size" else None)
    assert cost.verdict == fault
    assert cost.whole < 1.05 * DECLARED
    assert cost.alone < 2_000_000


@pytest.mark.parametrize("fault", ["checksum", "payload", "layout"])
def test_a_refused_factored_message_is_not_composed(fault: str, receive: Receive) -> None:
    good = honest("factors int4")
    header, payload = forge.parts(good)
    data = {
        "checksum": good[:-1] + bytes([good[-1] ^ 1]),
        "payload": forge.signed(header, payload + bytes(DECLARED)),
        "layout": forge.signed(header | {"hash": bytes(8)}, payload),
    }[fault]
    cost = receive(data, "factors int4")
    assert cost.verdict == fault
    assert cost.alone < 2_000_000
