"""Groups of clients in parallel on a CPU: one thread per group, instead of all threads in one small product.

No thread waits for another within a step. The results of a group, bit for bit, do not depend on the number of groups.
Groups are as large as possible: a thread waits for Python's lock between operators, and fewer operators on more clients
wait less. The calling thread computes too: the system may place two newly woken threads on the same core for a while.
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
"""Parameters of all clients of a round up to which a single thread does the work between parallel phases: OpenMP's
threads spin for milliseconds after each operator, on cores that the groups need."""


class StoppedError(Exception):
    """Raised in a group when the round is canceled."""


class Groups:
    """Threads that compute groups; they live as long as this object."""

    def __init__(self) -> None:
        self._threads: ThreadPoolExecutor | None = None
        self._shape = (0, 0)  # helper threads, and threads that each may use within an operator
        self._stopping = threading.Event()
        self._all = 0  # number of threads available, while fewer are in use

    def check(self) -> None:
        """Raise :class:`StoppedError` in a group if another has failed or the user has interrupted."""
        if self._stopping.is_set():
            raise StoppedError

    def compute(self, tasks: Sequence[Callable[[], Result]], threads: int, within: int) -> list[Result]:
        """Return the results of the tasks, in order, ``threads`` at a time with ``within`` threads in each.

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
        """The number of threads available, even while fewer are in use."""
        return self._all or torch.get_num_threads()

    @contextmanager
    def using(self, threads: int) -> Iterator[None]:
        """Let operators use this many threads inside the context."""
        before, outermost = torch.get_num_threads(), not self._all
        try:
            self._all = self.threads
            torch.set_num_threads(threads)
            yield
        finally:
            torch.set_num_threads(before)  # MKL applies the setting of one thread to all
            self._all = 0 if outermost else self._all

    def _side_by_side(self, tasks: Sequence[Callable[[], Result]], helpers: int, within: int) -> list[Result]:
        left, results = deque(enumerate(tasks)), dict[int, Result]()
        self._stopping = stopping = threading.Event()  # for this call only
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
            wait(futures)  # after a second Ctrl-C nobody waits for them, but they still stop
        failed = [one for one in (own, *(future.exception() for future in futures)) if one is not None]
        if failed:
            try:
                raise min(failed, key=lambda one: isinstance(one, StoppedError))
            finally:
                del own, failed, futures  # these reference this frame, which references the round's results
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
