"""Deployment on Flower: the package's algorithms as a Flower app, across real processes and machines.

``client_app(task)`` and ``server_app(task)`` build the two halves of an app from a user's ``task``: a model and each
node's data. Messages are encoded by :mod:`tdpfed.wire` and validated by the same checks as in a simulation.
"""

try:
    import flwr as _flwr  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("tdpfed.flower needs Flower: pip install 'tdpfed[flower]'", name="flwr") from error

from tdpfed.flower.client_app import client_app
from tdpfed.flower.private import load_personalized
from tdpfed.flower.server_app import server_app
from tdpfed.flower.task import Samples, Task

__all__ = ["Samples", "Task", "client_app", "load_personalized", "server_app"]
