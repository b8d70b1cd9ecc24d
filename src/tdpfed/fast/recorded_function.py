"""A function of tensors recorded once per kind of input as a graph of operators, and replayed.

For what a method asks of a model besides gradients: losses and products with the Hessian. Gradients themselves have
recordings with more rewrites (:mod:`tdpfed.fast.recorded_gradient`).
"""

from collections import OrderedDict
from collections.abc import Callable

from torch import Tensor

from tdpfed.fast.graph_rewrites import called_directly, simplified, without_unit_products
from tdpfed.fast.recorded_gradient import ONE_AT_A_TIME, RECORDINGS
from tdpfed.fast.tracing import recorded

Function = Callable[..., Tensor]


class RecordedFunction:
    """A function without side effects; it is called directly where it cannot be recorded."""

    def __init__(self, function: Function) -> None:
        self._function = function
        self._known: OrderedDict[tuple[object, ...], Function] = OrderedDict()

    def __call__(self, *given: Tensor) -> Tensor:
        """Return the function's result."""
        kind = tuple((tensor.shape, tensor.stride(), tensor.dtype, tensor.device) for tensor in given)
        found = self._known.get(kind)
        if found is None:
            with ONE_AT_A_TIME:
                found = self._known.get(kind) or self._recorded(*given)
                self._known[kind] = found
                if len(self._known) > RECORDINGS:
                    self._known.popitem(last=False)
        return found(*given)

    def _recorded(self, *given: Tensor) -> Function:
        def record(*tensors: Tensor) -> Tensor:  # make_fx reads the signature: a bound method's would not do
            return self._function(*tensors)

        try:
            graph = without_unit_products(recorded(record, *given))
            made = called_directly(simplified(graph) if given[0].device.type == "cpu" else graph)
            made(*given)  # checks that it runs
        except MemoryError:
            raise
        except Exception:  # its control flow depends on values: calling it directly raises what is wrong
            return self._directly
        return made

    def _directly(self, *given: Tensor) -> Tensor:
        with ONE_AT_A_TIME:
            return self._function(*given)
