"""The exception this package raises for bad input.

Its message names the field, the value that was given and what is allowed. The command line prints it and exits with 2;
anything else that reaches the top is a bug and keeps its traceback.
"""

import difflib
from collections.abc import Iterable, Sequence


class TDPFedError(ValueError):
    """Bad input: a field, its value and what is allowed."""


class CombinedError(TDPFedError):
    """Several errors found at once; ``lines`` has each on its own."""

    def __init__(self, errors: Sequence[TDPFedError]) -> None:
        self.lines = [str(error) for error in errors]
        super().__init__("; ".join(self.lines))


class QuorumError(TDPFedError):
    """A round had fewer accepted uploads than it needs, as often as it may be tried."""


def raise_all(errors: Sequence[TDPFedError]) -> None:
    """Raise what was found wrong, if anything was: one error as it is, several as one."""
    if errors:
        raise errors[0] if len(errors) == 1 else CombinedError(errors)


def unknown(field: str, value: object, allowed: Iterable[str]) -> TDPFedError:
    """Return the error for a name outside ``allowed``, with the nearest name as a suggestion."""
    names = sorted(allowed)
    near = difflib.get_close_matches(str(value), names, n=1)
    hint = f", did you mean {near[0]!r}?" if near else ";"
    return TDPFedError(f"{field}: unknown {value!r}{hint} Allowed: {', '.join(names)}")
