"""Communication-efficient personalised federated learning: every client keeps its own model, only CP factors travel."""

__version__ = "0.1.0"
