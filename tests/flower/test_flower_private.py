"""What a node keeps: written whole or not at all, checked when read, kept as long as a server may fall back."""

import os
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="the extra 'flower' is not installed")

import torch
from torch import nn

from tdpfed.errors import TDPFedError
from tdpfed.flower.private import PrivateStore, load_personalized, starts_of, state_folder

RUN = "0123456789abcdef"


def state(value: float) -> dict[str, torch.Tensor]:
    return {"theta": torch.full((6,), value), "seen": torch.ones(1)}


def rounds(store: PrivateStore) -> list[int]:
    return sorted(int(name.split(".")[0]) for name in os.listdir(store.folder))


def test_what_is_saved_is_read_back(tmp_path: Path) -> None:
    store = PrivateStore(tmp_path / "a" / "b")
    assert store.before(1, 1) is None
    store.save(1, 1, state(1.0), 0)
    found = PrivateStore(tmp_path / "a" / "b").before(2, 1)
    assert found is not None
    assert torch.equal(found["theta"], state(1.0)["theta"])
    assert found.keys() == {"theta", "seen"}
    assert (tmp_path / "a" / "b").stat().st_mode & 0o077 == 0


def test_a_round_that_is_repeated_starts_where_it_did(tmp_path: Path) -> None:
    store = PrivateStore(tmp_path)
    for number in (1, 2, 3):
        store.save(number, 1, state(number), 0)
    again = store.before(3, 1)
    assert again is not None
    assert float(again["theta"][0]) == 2


def test_states_are_kept_from_the_last_checkpoint_on(tmp_path: Path) -> None:
    store = PrivateStore(tmp_path)
    for number in range(1, 7):
        store.save(number, 1, state(number), settled=4 if number > 4 else 0)
    assert rounds(store) == [4, 5, 6]
    fallen = store.before(5, 2)  # a server that was restarted asks for round 5 again
    assert fallen is not None
    assert float(fallen["theta"][0]) == 4
    store.save(5, 2, state(55), settled=4)
    assert rounds(store) == [4, 5]  # what the old server had seen of round 6 is gone


def test_late_messages_are_refused(tmp_path: Path) -> None:
    store = PrivateStore(tmp_path)
    store.save(4, 2, state(4), 0)
    for number, session in ((3, 2), (9, 1)):
        with pytest.raises(TDPFedError, match="the message is late"):
            store.before(number, session)
    assert store.before(4, 2) is None
    assert store.before(3, 3) is None


def test_every_damage_is_seen(tmp_path: Path) -> None:
    store = PrivateStore(tmp_path)
    store.save(1, 1, state(1.0), 0)
    (file,) = tmp_path.iterdir()
    good = file.read_bytes()
    damages = [good[:at] for at in range(len(good))]
    damages += [good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :] for at in range(len(good))]
    for bad in damages:
        file.write_bytes(bad)
        with pytest.raises(TDPFedError, match="is damaged"):
            store.upto(9)


def test_a_kill_while_writing_leaves_the_state_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = PrivateStore(tmp_path)
    store.save(1, 1, state(1.0), 0)

    def killed(descriptor: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", killed)
    with pytest.raises(KeyboardInterrupt):
        store.save(2, 1, state(2.0), 1)
    found = store.upto(9)
    assert found is not None
    assert float(found["theta"][0]) == 1


def test_folders_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TDPFedError, match="state-dir: cannot read"):
        PrivateStore(tmp_path / "file").before(1, 1)
    with pytest.raises(TDPFedError, match="state-dir: cannot"):
        PrivateStore(tmp_path / "file" / "below").save(1, 1, state(1.0), 0)
    with pytest.raises(TDPFedError, match="state-dir: cannot write"), PrivateStore(tmp_path / "file" / "x").locked():
        pass
    (tmp_path / "00000001.safetensors").mkdir()
    with pytest.raises(TDPFedError, match="state-dir: cannot read"):
        PrivateStore(tmp_path).upto(1)


def test_the_folder_is_the_nodes_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert state_folder({"state-dir": str(tmp_path)}, RUN, 3) == tmp_path / RUN / "client-3"
    monkeypatch.setenv("TDPFED_STATE", str(tmp_path / "env"))
    assert state_folder({}, RUN, 0) == tmp_path / "env" / RUN / "client-0"
    monkeypatch.delenv("TDPFED_STATE")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "xdg"))
    assert state_folder({}, RUN, 0) == tmp_path / "xdg" / "tdpfed" / RUN / "client-0"
    monkeypatch.delenv("XDG_STATE_HOME")
    assert state_folder({}, RUN, 0).is_relative_to(Path.home())


@pytest.mark.parametrize("run", ["../../../../etc", "", None, 7, "0123456789abcdeg", "0123456789abcdef/.."])
def test_a_server_cannot_choose_another_folder(run: object, tmp_path: Path) -> None:
    with pytest.raises(TDPFedError, match=r"run: .* in a message, must be 16 hexadecimal digits"):
        state_folder({"state-dir": str(tmp_path)}, run, 0)


def test_a_personalized_model_is_loaded_into_a_module(tmp_path: Path) -> None:
    PrivateStore(tmp_path).save(1, 1, {"theta": torch.arange(6.0)}, 0)
    model = nn.Linear(2, 2)
    model.load_state_dict(load_personalized(tmp_path, model))
    assert model.weight.tolist() == [[0, 1], [2, 3]]
    with pytest.raises(TDPFedError, match=r"holds \(6,\) values, must hold a model of 12"):
        load_personalized(tmp_path, nn.Linear(3, 3))
    with pytest.raises(TDPFedError, match="holds nothing"):
        load_personalized(tmp_path / "none", model)


def test_a_late_save_takes_nothing_away(tmp_path: Path) -> None:
    old, new = PrivateStore(tmp_path), PrivateStore(tmp_path, (0, 3))
    old.save(3, 1, state(3), 0)
    assert old.before(5, 1) is not None  # a process of the old session begins, and is slow
    new.save(4, 2, state(4), 3)
    with pytest.raises(TDPFedError, match="round 4 of session 2; the message is late"):
        old.save(5, 1, state(5), 5)
    assert rounds(new) == [3, 4]


def test_one_process_at_a_time_goes_from_one_state_to_the_next(tmp_path: Path) -> None:
    import threading

    store, order = PrivateStore(tmp_path), []

    def second() -> None:
        with PrivateStore(tmp_path).locked():
            order.append("second")

    with store.locked():
        thread = threading.Thread(target=second)
        thread.start()
        thread.join(0.3)
        order.append("first")
    thread.join()
    assert order == ["first", "second"]


def test_what_a_killed_save_left_is_removed(tmp_path: Path) -> None:
    (tmp_path / "00000001-0123.part").write_bytes(b"half")
    PrivateStore(tmp_path).save(1, 1, state(1), 0)
    assert [file.name for file in tmp_path.iterdir()] == ["00000001.safetensors"]


def test_states_behind_which_a_server_went_back_do_not_count(tmp_path: Path) -> None:
    for number in (1, 2, 5):
        PrivateStore(tmp_path).save(number, 1, state(number), 0)
    for starts, wanted in (((0,), 5), ((0, 3), 2), ((0, 3, 9), 2), ((0, 1), 1)):
        found = PrivateStore(tmp_path, starts).before(9, len(starts))
        assert found is not None
        assert float(found["theta"][0]) == wanted
    assert PrivateStore(tmp_path, (0, 0)).before(9, 2) is None
    PrivateStore(tmp_path, (0, 3)).save(9, 2, state(9), 3)
    assert rounds(PrivateStore(tmp_path)) == [2, 9]


def test_a_state_that_is_needed_and_gone_is_an_error(tmp_path: Path) -> None:
    for number in range(1, 6):
        PrivateStore(tmp_path).save(number, 1, state(number), number - 1)
    assert rounds(PrivateStore(tmp_path)) == [4, 5]
    with pytest.raises(TDPFedError, match=r"needed but deleted: .* begins with round 4"):
        PrivateStore(tmp_path, (0, 2)).before(3, 2)
    assert PrivateStore(tmp_path, (0, 0)).before(3, 2) is None  # from the start there is nothing to miss


@pytest.mark.parametrize("value", [None, 3, "", "1,2", "0;2", "0,-1", "0," + "9" * 11])
def test_starts_of_a_message_are_checked(value: object) -> None:
    with pytest.raises(TDPFedError, match="starts: "):
        starts_of(value)
