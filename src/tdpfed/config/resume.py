"""What may differ between a run and its resumption; every other key of the configuration must be the same."""

import json
from collections.abc import Mapping
from typing import Any

from tdpfed.config.loading import flat
from tdpfed.config.sections import Config
from tdpfed.errors import TDPFedError, raise_all

MAY_DIFFER: Mapping[str, str] = {
    "run.rounds": "the run ends later; completed rounds stay; fixed if a schedule follows it",
    "run.evaluate_every": "which rounds are reported",
    "run.train_loss": "whether models are also evaluated on training samples",
    "run.diagnostics_every": "which rounds are measured",
    "run.loggers": "where records are also sent",
    "run.device": "where it is computed; sums are rounded differently",
    "run.threads": "how it is computed; sums may be rounded differently",
    "run.chunk": "how clients are grouped",
    "checkpoint.every": "which rounds are saved",
    "checkpoint.keep": "how many checkpoints are kept",
    "engine.state": "where private state is stored",
}
"""The keys that may differ, and what they change. None of them changes what is computed, but for the last bits."""


def settings_by_key(config: Config) -> dict[str, Any]:
    """Return a configuration by full key, as the plain values that JSON gives back: lists, no tuples."""
    values: dict[str, Any] = json.loads(json.dumps(flat(config.as_dict())))
    return values


def follows_rounds(config: Config) -> bool:
    """Return whether what a round computes depends on the number of rounds: its rate, or what it trains on."""
    chosen = config.evaluation
    halved = chosen.personalize == "best" and chosen.choose_rounds is None and not config.data.validation
    return halved or config.optimizer.over(config.run.rounds) != config.optimizer


def check_same_run(saved: object, config: Config, where: str) -> None:
    """Refuse a configuration that differs from a saved one in anything but :data:`MAY_DIFFER`; name all differences.

    ``where`` says what was saved, such as ``the checkpoint``.
    """
    if not isinstance(saved, Mapping):
        raise TDPFedError(f"none saved in {where}, so it cannot be shown to be of this run", field="configuration")
    now, may_differ = settings_by_key(config), set(MAY_DIFFER)
    if follows_rounds(config):
        may_differ.remove("run.rounds")
    raise_all(
        [
            TDPFedError(
                f"{now.get(key)!r} given, must be {saved.get(key)!r} as in {where}",
                field=key,
                value=now.get(key),
                allowed=repr(saved.get(key)),
            )
            for key in sorted({*saved, *now} - may_differ, key=str)
            if saved.get(key) != now.get(key)
        ]
    )
