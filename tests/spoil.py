"""Damage to files, as an accident or an enemy does it. Shared by the tests."""

from random import Random


def mutated(content: bytes, random: Random) -> bytes:
    """Flip bits, set bytes and words to extremes, cut, repeat or move a part: one or a few of these."""
    data = bytearray(content)
    for _ in range(random.choice([1, 1, 2, 4])):
        place, count = random.randrange(len(data)), random.choice([1, 2, 4, 8])
        kind = random.randrange(6)
        if kind == 0:
            data[place] ^= 1 << random.randrange(8)
        elif kind == 1:
            data[place : place + count] = random.choice([b"\0", b"\xff", b"\x7f", b"\x80"]) * count
        elif kind == 2:
            del data[place : place + count]
        elif kind == 3:
            data[place:place] = data[place : place + count]
        elif kind == 4:
            data[place:place] = random.randbytes(count)
        else:
            data = data[: max(1, place)] if random.random() < 0.3 else data
            data[place : place + count] = random.choice([b"9", b"0", b"-", b"1", b"(", b"'"]) * count
    return bytes(data)
