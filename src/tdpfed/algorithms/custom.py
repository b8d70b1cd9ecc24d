"""Custom methods, named as ``package.module:Class``: imported and checked before a run."""

import importlib
import inspect
from typing import TypeGuard

from tdpfed.algorithms.base import Algorithm
from tdpfed.errors import TDPFedError, nearest

RULE = "must be 'package.module:Class', a subclass of tdpfed.algorithms.Algorithm"


def load(spec: str) -> type[Algorithm]:
    """Return the class that ``spec`` names, from a module that Python finds."""
    module, _, name = spec.partition(":")
    if not (name.isidentifier() and all(part.isidentifier() for part in module.split("."))):
        raise _refused(spec, RULE)
    try:
        found = vars(importlib.import_module(module))
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise _failed(spec, module, error) from error  # an import inside the module failed
        raise _refused(spec, f"but there is no module {error.name!r}, installed or in the working directory") from None
    except (Exception, SystemExit) as error:  # the user's own code may raise anything
        raise _failed(spec, module, error) from error
    if name not in found:
        methods = [one for one, value in found.items() if _is_method(value)]
        near = nearest(name, methods)
        hint = f"; did you mean {near!r}?" if near else ""
        raise _refused(spec, f"but the module {module!r} has no {name!r}{hint}")
    return _checked(spec, found[name])


def _checked(spec: str, method: object) -> type[Algorithm]:
    """Return the method if it can run; raise an error that says what is wrong otherwise."""
    if not _is_method(method):
        kind = "class" if isinstance(method, type) else type(method).__name__
        raise _refused(spec, f"which is another {kind}, {RULE}")
    if missing := sorted(getattr(method, "__abstractmethods__", ())):
        raise _refused(spec, f"which is abstract, must define {', '.join(missing)}")
    if not isinstance(vars(method).get("name"), str):
        raise _refused(spec, 'must have its own name, such as name = "ditto"')
    try:
        method.hyper_parameters()
    except TDPFedError as error:
        raise _refused(spec, f"but {error}") from None
    return method


def _is_method(value: object) -> TypeGuard[type[Algorithm]]:
    return inspect.isclass(value) and issubclass(value, Algorithm) and value is not Algorithm


def _failed(spec: str, module: str, error: BaseException) -> TDPFedError:
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return _refused(spec, f"but the import of {module!r} failed ({text})")


def _refused(spec: str, why: str) -> TDPFedError:
    return TDPFedError(f"{spec!r} given, {why}", field="name", value=spec, allowed=RULE)
