"""Groups of clients side by side on a CPU: one thread for each, instead of all threads in one small product.

No thread waits for another within a step. What a group computes does not depend on how many there are, so neither do
its bits. A group is as large as it can be: between two operators a thread waits for Python's lock, and fewer operators
on more clients wait less.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from functools import partial
from typing import TypeVar

import torch

Result = TypeVar("Result")

SMALL = 500_000
"""Parameters of a round's clients up to which one thread computes them all: a second would wait more than compute."""


class StoppedError(Exception):
    """Raised in a group when the round is not wanted any more."""


class Groups:
    """Threads that compute groups; they live as long as this does."""

    def __init__(self) -> None:
        self._threads: ThreadPoolExecutor | None = None
        self._shape = (0, 0)  # threads, and what each may use within a product
        self._stopping = threading.Event()

    def check(self) -> None:
        """Raise :class:`StoppedError` in a group if another has failed or the user has had enough."""
        if self._stopping.is_set():
            raise StoppedError

    def compute(self, tasks: Sequence[Callable[[], Result]], threads: int, within: int) -> list[Result]:
        """Return what the tasks give, in their order, ``threads`` at a time with ``within`` threads in each.

        What the first that fails raises is raised; the others are stopped before.
        """
        threads = min(threads, len(tasks))
        before = torch.get_num_threads()
        try:
            torch.set_num_threads(within)
            if threads <= 1:
                return [task() for task in tasks]
            return self._side_by_side(tasks, self._pool(threads, within))
        finally:
            torch.set_num_threads(before)  # what a thread sets for itself, MKL takes for all

    def _side_by_side(self, tasks: Sequence[Callable[[], Result]], pool: ThreadPoolExecutor) -> list[Result]:
        futures: list[Future[Result]] = [pool.submit(task) for task in tasks]
        try:
            wait(futures, return_when=FIRST_EXCEPTION)
        finally:  # also after Ctrl-C
            if not all(future.done() for future in futures):
                self._stopping.set()
                for future in futures:
                    future.cancel()
                wait(futures)
                self._stopping.clear()
        failed = [future for future in futures if not future.cancelled() and future.exception() is not None]
        for future in sorted(failed, key=lambda one: isinstance(one.exception(), StoppedError)):
            future.result()
        return [future.result() for future in futures]

    def _pool(self, threads: int, within: int) -> ThreadPoolExecutor:
        if self._threads is None or self._shape != (threads, within):
            self._threads = ThreadPoolExecutor(threads, "clients", partial(torch.set_num_threads, within))
            self._shape = threads, within
        return self._threads
