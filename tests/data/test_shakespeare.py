"""The plays by speaker: every style of marks, and what belongs to nobody."""

import numpy as np
import pytest

from tdpfed.data.shakespeare import PLAYS, VOCABULARY, clients, speeches, windows

CAPITALS = """THE KEEPER AND THE COOK

Persons Represented.

ADAM, a Keeper.
Servants.

ACT I.

SCENE I. A kitchen.

[Enter ADAM and the
COOK.]

ADAM.
Good day,
    sir; [aside] how  cold!

THE COOK.
I know it.

[Exit.]

[A bell.]
I know it well.

SONG.

Sing, 23 birds@!

ACT II. SCENE II. The same.

A stage hand speaks in no one's name.

ADAM.

A late word.

2. MAN.
Yes.

THE END"""

MIXED = """A PLAY

Bernardo, an Officer.
Marcellus, Officer.
Martin, his Son.
Queen of all.

ACT I.

Scene I. A platform.

[Enter.]

Ber.
WHO is there?

Mar.
Nay, answer:

I think so.

Lady Queen.
Long live the king!

1 Clown.
He.

Bernardo.
Again.
"""

NO_STOPS = CAPITALS.replace("ADAM.\n", "ADAM\n").replace("COOK.\n", "COOK\n").replace("MAN.\n", "MAN\n")


@pytest.mark.parametrize("text", [CAPITALS, NO_STOPS], ids=["with stops", "without"])
def test_marks_in_capitals(text: str) -> None:
    assert speeches(text) == {
        "ADAM": "Good day,\nsir; how cold!\nA late word.",
        "THE COOK": "I know it.\nI know it well.\nSing, birds!",
        "2. MAN": "Yes.",
    }


def test_marks_in_mixed_case_and_abbreviated() -> None:
    assert speeches(MIXED) == {
        "BERNARDO": "WHO is there?\nAgain.",
        "MAR": "Nay, answer:\nI think so.",  # Marcellus or Martin
        "LADY QUEEN": "Long live the king!",
        "1 CLOWN": "He.",
    }


def test_a_play_without_stage_directions_or_text_has_no_speakers() -> None:
    for text in ("", "[", "no marks at all", "[Enter.]\n\nnobody"):
        assert speeches(text) == {}


def test_ids_name_play_and_speaker_and_short_parts_are_left_out() -> None:
    found = clients({"henry_iv_part_1": CAPITALS, "the_merchant_of_rome": MIXED}, 20)
    assert list(found) == [
        "Henry IV Part 1/ADAM", "Henry IV Part 1/THE COOK", "The Merchant of Rome/BERNARDO", "The Merchant of Rome/MAR",
    ]  # fmt: skip
    assert all(len(said) >= 20 for said in found.values())
    assert len(clients({"a": CAPITALS}, 0)) == 3
    assert len(PLAYS) == len(set(PLAYS)) == 37


@pytest.mark.parametrize("length", [1, 4, 7])
def test_windows_put_the_text_together_again_and_share_no_character(length: int) -> None:
    text = speeches(CAPITALS)["THE COOK"]
    x, y = windows(text, length)
    assert x.shape == y.shape == (len(text) // (length + 1), length)
    assert np.array_equal(x[:, 1:], y[:, :-1])
    rows = np.concatenate([x, y[:, -1:]], axis=1)
    assert "".join(VOCABULARY[token] for token in rows.flat) == text[: rows.size]
    assert windows("ab", 2)[0].shape == (0, 2)


def test_the_vocabulary_has_every_character_once() -> None:
    assert len(VOCABULARY) == len(set(VOCABULARY)) == 66
    assert set(speeches(CAPITALS)["ADAM"]) <= set(VOCABULARY)
