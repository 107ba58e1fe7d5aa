"""A kernel launch of which all but the tensors is known: what a call of the same shapes repeats.

The first call compiles, and every call hands the driver new addresses (`kernel_call.py`). Building
and hashing a launch's arguments in every call took as long as the launch itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from megascale.kernels.driver import current_stream
from megascale.kernels.kernel_call import KernelCall, loaded


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
        self._call: KernelCall | None = None  # for addresses that 16 bytes divide
        self._loaded: set[bool] = set()  # whether for such addresses

    def load(self, *tensors: Tensor | None) -> None:
        """Compile it for such tensors and load it on their device; once."""
        present = [tensor for tensor in tensors if tensor is not None]
        self._load(tensors, present, _are_aligned(present))

    def launch(self, *tensors: Tensor | None) -> None:
        """On the current stream of the tensors' device; `tensors` in the kernel's order."""
        present = [tensor for tensor in tensors if tensor is not None]
        are_aligned = _are_aligned(present)
        self._load(tensors, present, are_aligned)
        if self._call is not None and are_aligned:
            self._call.launch(current_stream(present[0].device.index), present)
        else:
            self.kernel[(self.programs,)](**self._arguments(tensors), **self.constants)

    def _load(
        self, tensors: tuple[Tensor | None, ...], present: list[Tensor], are_aligned: bool
    ) -> None:
        if are_aligned in self._loaded:
            return
        arguments = self._arguments(tensors)
        compiled = loaded(self.kernel, present[0].device, arguments, self.constants)
        if compiled is not None and are_aligned:
            self._call = KernelCall(compiled, arguments, self.programs)
        self._loaded.add(are_aligned)

    def _arguments(self, tensors: tuple[Tensor | None, ...]) -> dict[str, Any]:
        return {**dict(zip(self._names, tensors, strict=True)), **self.integers}


def _are_aligned(tensors: Sequence[Tensor]) -> bool:
    return not any(tensor.data_ptr() % 16 for tensor in tensors)
