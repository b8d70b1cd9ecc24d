"""The API reference shows a setting as what it is: a default and a meaning, which the code writes in a call."""

import ast
from typing import Any

from griffe import Attribute, Docstring, ExprCall, Extension

DECLARES = ("setting", "hyper")


class Settings(Extension):
    """Read ``momentum: float = setting(0.0, "meaning", least=0)`` as a default of 0.0 and a docstring."""

    def on_attribute_instance(self, *, attr: Attribute, **_: Any) -> None:
        """Take a setting's declaration apart."""
        if isinstance(attr.value, ExprCall) and str(attr.value.function) in DECLARES:
            given = [part for part in attr.value.arguments if not str(part).startswith(("least=", "most=", "above="))]
            default, meaning = given[:2]
            attr.value = default
            attr.docstring = Docstring(f"{ast.literal_eval(str(meaning)).capitalize()}.", parent=attr)
