"""A kernel launch of which all but the tensors is known: what a call of the same shapes repeats.

The first call goes through Triton, which compiles; the following ones hand the driver new addresses
(`kernel_call.py`). Building and hashing a launch's arguments in every call took as long as the
launch itself.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from megascale.flux.driver import current_stream
from megascale.flux.kernel_call import KernelCall


class Prepared:
    """One kernel for one problem and one device.

    programs   of the grid
    integers   the kernel's arguments behind its tensors, by name
    constants  constexprs and options
    """

    def __init__(
        self, kernel: Any, programs: int, integers: dict[str, int], constants: dict[str, Any]
    ) -> None:
        self.kernel = kernel
        self.programs = programs
        self.integers = integers
        self.constants = constants
        self._names = kernel.arg_names[: kernel.arg_names.index(next(iter(integers)))]
        self._call: KernelCall | None = None

    def launch(self, *tensors: Tensor | None) -> None:
        """On the current stream of the tensors' device; `tensors` in the kernel's order."""
        present = [tensor for tensor in tensors if tensor is not None]
        is_aligned = not any(tensor.data_ptr() % 16 for tensor in present)
        if self._call is not None and is_aligned:
            self._call.launch(current_stream(present[0].device.index), present)
            return
        arguments = {**dict(zip(self._names, tensors, strict=True)), **self.integers}
        compiled = self.kernel[(self.programs,)](**arguments, **self.constants)
        if is_aligned and present[0].device.type == "cuda":
            self._call = KernelCall(compiled, arguments, self.programs)
