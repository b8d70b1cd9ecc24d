"""The API reference shows a setting as what it is: a default and a meaning, which the code writes in a call."""

import ast
from typing import Any

from griffe import Attribute, Docstring, ExprCall, ExprKeyword, Extension

DECLARES = ("setting", "hyper")


class Settings(Extension):
    """Read ``momentum: float = setting(0.0, "meaning", least=0)`` as a default of 0.0 and a docstring."""

    def on_attribute_instance(self, *, attr: Attribute, **_: Any) -> None:
        """Take a setting's declaration apart."""
        if isinstance(attr.value, ExprCall) and str(attr.value.function) in DECLARES:
            named = {part.name: part.value for part in attr.value.arguments if isinstance(part, ExprKeyword)}
            given = [part for part in attr.value.arguments if not isinstance(part, ExprKeyword)]
            default, meaning = [*given, None, None][0], [*given, None, None][1] or named.get("doc", "''")
            attr.value = default
            if text := ast.literal_eval(str(meaning)):
                attr.docstring = Docstring(f"{text}.", parent=attr)
