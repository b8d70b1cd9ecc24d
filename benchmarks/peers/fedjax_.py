"""fedjax: its own FedAvg, and pFedMe written on its per-client interface, both compiled by its jit backend."""

from typing import Any

import jax  # type: ignore[import-not-found]
import jax.numpy as jnp  # type: ignore[import-not-found]

if not hasattr(jax, "tree_map"):  # removed since its last release
    jax.tree_map = jax.tree_util.tree_map
    jax.tree_leaves, jax.tree_util.tree_multimap = jax.tree_util.tree_leaves, jax.tree_util.tree_map

import fedjax  # type: ignore[import-not-found]
from fedjax.algorithms import fed_avg  # type: ignore[import-not-found]
from fedjax.core import for_each_client  # type: ignore[import-not-found]
from shared_ import BATCH, ETA, ETA_P, INNER, LAM, STEPS, arguments, clients, report, timed, unsupported


def loss(params: Any, batch: Any, rng: Any) -> Any:
    del rng
    hidden = jax.nn.relu(batch["x"] @ params["w1"] + params["b1"])
    logits = hidden @ params["w2"] + params["b2"]
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), batch["y"][:, None], 1))


def initial() -> Any:
    first, second = jax.random.split(jax.random.PRNGKey(0))
    return {
        "w1": jax.random.normal(first, (784, 100)) / 28, "b1": jnp.zeros(100),
        "w2": jax.random.normal(second, (100, 10)) / 10, "b2": jnp.zeros(10),
    }  # fmt: skip


def pfedme() -> Any:
    """pFedMe for one client in fedjax's terms: theta and w in the step state, w is returned."""

    def start(shared: Any, given: Any) -> Any:
        del given
        return {"w": shared, "theta": shared}

    def step(state: Any, batch: Any) -> Any:
        theta = state["theta"]
        for _ in range(INNER):
            gradient = jax.grad(loss)(theta, batch, None)
            theta = jax.tree_util.tree_map(lambda t, g, w: t - ETA_P * (g + LAM * (t - w)), theta, gradient, state["w"])
        w = jax.tree_util.tree_map(lambda w, t: w - ETA * LAM * (w - t), state["w"], theta)
        return {"w": w, "theta": theta}

    return for_each_client.for_each_client(start, step, lambda _, state: state["w"])


def main() -> None:
    path, method, rounds = arguments()
    if method not in ("fedavg", "pfedme"):
        unsupported(method)
    data = {str(k): {"x": x, "y": y} for k, (x, y) in enumerate(clients(path))}
    users = fedjax.InMemoryFederatedData(data)
    hparams = fedjax.ShuffleRepeatBatchHParams(batch_size=BATCH, num_epochs=None, num_steps=STEPS, drop_remainder=True)
    cohort = [(name, users.get_client(name)) for name in users.client_ids()]
    keys = list(jax.random.split(jax.random.PRNGKey(1), len(cohort)))
    if method == "fedavg":
        algorithm = fed_avg.federated_averaging(
            jax.grad(loss), fedjax.optimizers.sgd(ETA), fedjax.optimizers.sgd(1.0), hparams
        )
        state = [algorithm.init(initial())]

        def one_round() -> None:
            state[0], _ = algorithm.apply(state[0], [(n, d, k) for (n, d), k in zip(cohort, keys, strict=True)])
            jax.block_until_ready(state[0].params)
    else:
        run, server = pfedme(), [initial()]

        def one_round() -> None:
            given = [(name, d.shuffle_repeat_batch(hparams), None) for name, d in cohort]
            total = jax.tree_util.tree_map(jnp.zeros_like, server[0])
            for _, w in run(server[0], given):
                total = jax.tree_util.tree_map(lambda a, b: a + b / len(cohort), total, w)
            server[0] = jax.block_until_ready(total)

    report(timed(one_round, rounds), ["fedjax", "jax"])


if __name__ == "__main__":
    main()
