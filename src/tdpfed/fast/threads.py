"""Groups of clients side by side on a CPU: one thread for each, instead of all threads in one small product.

No thread waits for another within a step. What a group computes does not depend on how many there are, so neither do
its bits. A group is as large as it can be: between two operators a thread waits for Python's lock, and fewer operators
on more clients wait less. The thread that asks computes too: of two that are woken at once, the system may put both on
one core for a while.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TypeVar

import torch

Result = TypeVar("Result")

QUIET_PARAMETERS = 16_000_000
"""Parameters of a round's clients up to which one thread does the work between the groups of one round and the next:
OpenMP's threads spin for milliseconds after each operator, on cores that the groups would need."""


class StoppedError(Exception):
    """Raised in a group when the round is not wanted any more."""


class Groups:
    """Threads that compute groups; they live as long as this does."""

    def __init__(self) -> None:
        self._threads: ThreadPoolExecutor | None = None
        self._shape = (0, 0)  # threads beside the asking one, and what each may use within a product
        self._stopping = threading.Event()
        self._all = 0  # threads there are, while fewer are used

    def check(self) -> None:
        """Raise :class:`StoppedError` in a group if another has failed or the user has had enough."""
        if self._stopping.is_set():
            raise StoppedError

    def compute(self, tasks: Sequence[Callable[[], Result]], threads: int, within: int) -> list[Result]:
        """Return what the tasks give, in their order, ``threads`` at a time with ``within`` threads in each.

        If one fails the others are stopped, and what it raised is raised.
        """
        threads = min(threads, len(tasks))
        with self.using(within):
            if threads <= 1:
                self._stopping = threading.Event()
                return [task() for task in tasks]
            return self._side_by_side(tasks, threads - 1, within)

    @property
    def threads(self) -> int:
        """How many threads there are, whatever is being used."""
        return self._all or torch.get_num_threads()

    @contextmanager
    def using(self, threads: int) -> Iterator[None]:
        """Have operators use so many threads for a while."""
        before, outermost = torch.get_num_threads(), not self._all
        try:
            self._all = self.threads
            torch.set_num_threads(threads)
            yield
        finally:
            torch.set_num_threads(before)  # what a thread sets for itself, MKL takes for all
            self._all = 0 if outermost else self._all

    def _side_by_side(self, tasks: Sequence[Callable[[], Result]], helpers: int, within: int) -> list[Result]:
        left, results = deque(enumerate(tasks)), dict[int, Result]()
        self._stopping = stopping = threading.Event()  # of this call alone
        mode = torch.inference_mode if torch.is_inference_mode_enabled() else nullcontext  # each thread has its own

        def work() -> None:
            try:
                with mode():
                    while (one := _next(left)) is not None and not stopping.is_set():
                        results[one[0]] = one[1]()
            except BaseException:
                stopping.set()
                raise

        futures: list[Future[None]] = []
        own: BaseException | None = None
        try:
            pool = self._pool(helpers, within)
            futures += [pool.submit(work) for _ in range(helpers)]
            work()
            wait(futures)
        except BaseException as error:  # also Ctrl-C
            own = error
            stopping.set()
            wait(futures)  # a second Ctrl-C leaves them to themselves: they stop all the same
        failed = [one for one in (own, *(future.exception() for future in futures)) if one is not None]
        if failed:
            try:
                raise min(failed, key=lambda one: isinstance(one, StoppedError))
            finally:
                del own, failed, futures  # they hold this frame, and it what the round has computed
        return [results[number] for number in range(len(tasks))]

    def _pool(self, threads: int, within: int) -> ThreadPoolExecutor:
        if self._threads is None or self._shape != (threads, within):
            self._threads = ThreadPoolExecutor(threads, "clients", partial(torch.set_num_threads, within))
            self._shape = threads, within
        return self._threads


def _next(left: deque[tuple[int, Callable[[], Result]]]) -> tuple[int, Callable[[], Result]] | None:
    try:
        return left.popleft()
    except IndexError:
        return None
