"""The client half of an app: unpacks Flower's messages, calls the node and packs its replies. Quick to import."""

import time

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from tdpfed.flower import envelope
from tdpfed.flower.node import CopyError, Node
from tdpfed.flower.task import Task

NUDGE_PERIOD = 5.0
"""Nudges are answered when the clock is at a multiple of so many seconds, so that two are answered together."""


def client_app(task: Task) -> ClientApp:
    """Return the ClientApp of a task."""
    app = ClientApp()

    @app.query()
    def hello(message: Message, context: Context) -> Message:
        if envelope.fields_of(message).get(envelope.NUDGE):
            time.sleep(-time.time() % NUDGE_PERIOD)
            return envelope.reply(message, {}, None, {})
        return envelope.reply(message, _node(task, context).hello(), None, {})

    @app.train()
    def train(message: Message, context: Context) -> Message:
        began, node = time.perf_counter(), _node(task, context)
        try:
            upload, metrics = node.train(
                envelope.fields_of(message), lambda limit: envelope.wire_of(message, limit, node.client)
            )
        except CopyError:
            return envelope.reply(message, {envelope.LACKS: True}, None, {})
        metrics["seconds"] = time.perf_counter() - began
        return envelope.reply(message, {}, upload, metrics)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        node = _node(task, context)
        metrics = node.evaluate(
            envelope.fields_of(message), lambda limit: envelope.wire_of(message, limit, node.client)
        )
        return envelope.reply(message, {}, None, metrics)

    return app


def _node(task: Task, context: Context) -> Node:
    return Node(task, context.run_config, context.node_config)
