"""Changes the arithmetic of a running test: sums in the other order, or a deliberate mistake in one place.

`installed()` patches the operators of PyTorch on a CPU and of Triton's interpreter: matrix products, sums, running
sums, elementwise products, and the interpreter's loads. It also patches `sympow.attention`, so that a token can be left
out. Each patched operator asks the current `Arithmetic` what to change. Operators in float64 are not changed, because
tests compute what they expect in float64.
"""

from __future__ import annotations

import os
import random
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

import sympow
from sympow.ops.interface import attention

SOURCE = f"{Path(sympow.__file__).parent}{os.sep}"
LOWER_PRECISIONS = frozenset({"float32", "float16", "bfloat16"})
KINDS = {
    "token": ("term", "index"),
    "product": ("term", "index"),
    "sum": ("term",),
    "running sum": ("term", "index"),
    "load": ("index",),
    "elementwise product": ("index",),
}


@dataclass(frozen=True)
class Mistake:
    """A deliberate mistake in one place.

    Args:
        place: an operator at a line of the package, a key of `Arithmetic.places`.
        kind: "term" leaves out the first term of a sum; "index" shifts one operand, or what is loaded, by one entry.
        call: which execution of the place is wrong; None: all of them.
    """

    place: str
    kind: str
    call: int | None


@dataclass
class Arithmetic:
    """What to change in the operators of a test, and a count of their executions.

    Args:
        backwards: sum the terms of products and sums from the last to the first.
        mistake: the mistake to make, if any.
        precisions: dtypes of the operators that are counted and may have a mistake.
    """

    backwards: bool = False
    mistake: Mistake | None = None
    precisions: frozenset[str] = LOWER_PRECISIONS
    # How often each place was executed.
    places: Counter[str] = field(default_factory=Counter)

    def change(self, operation: str, dtype: Any, *operands: Tensor) -> str | None:
        """What to do in place of this operation: "term", "index", "backwards" or None."""
        if str(dtype).rpartition(".")[2] in self.precisions:
            place = f"{operation} in {_line()} {' × '.join(_shape(x) for x in operands)}".rstrip()
            self.places[place] += 1
            wrong = self.mistake
            if wrong is not None and wrong.place == place and wrong.call in (None, self.places[place] - 1):
                return wrong.kind
        return "backwards" if self.backwards else None


_current = Arithmetic()


def use(how: Arithmetic) -> None:
    """Makes this the arithmetic from now on."""
    global _current
    _current = how


def mistakes_in(places: Counter[str]) -> Iterator[Mistake]:
    """Mistakes to try: first each in a single execution, a third of the way through, then each in all executions.

    A mistake in all executions may cancel where both sides of a comparison run the same code.
    """
    shuffled = sorted(places.items())
    random.Random(0).shuffle(shuffled)
    # Places where a token can be left out first, since that changes every output and gradient.
    shuffled.sort(key=lambda place: not place[0].startswith("token"))
    for always in (False, True):
        for place, calls in shuffled:
            for kind in KINDS[place.partition(" in ")[0]]:
                yield Mistake(place, kind, None if always else calls // 3)


def _line() -> str:
    """The line of the package that is being executed. Gradients of PyTorch's own operators have none."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_filename.startswith(SOURCE):
            return f"{frame.f_code.co_filename.removeprefix(SOURCE)}:{frame.f_lineno}"
        frame = frame.f_back
    return "the backward pass"


def _shape(x: Tensor) -> str:
    return "·".join(map(str, x.shape))


@contextmanager
def installed() -> Iterator[None]:
    """Patches PyTorch's operators on a CPU, and those of Triton's interpreter if it is installed."""
    library = torch.library.Library("aten", "IMPL")
    for name, function in (
        ("mm", _matrix_product),
        ("bmm", _batched_product),
        ("addmm", _added_product),
        ("baddbmm", _batched_added_product),
        ("sum.dim_IntList", _sum),
        ("cumsum", _running_sum),
        ("mul.Tensor", _elementwise_product),
    ):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Warning only once for all operators")
            library.impl(name, function, "CPU", allow_override=True)
    undo = _patch_interpreter()
    attention, sympow.attention = sympow.attention, _attention
    try:
        yield
    finally:
        sympow.attention = attention
        undo()
        library._destroy()


def _operands(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """The operands of a matrix product, changed as the current arithmetic says."""
    change = _current.change("product", a.dtype, a, b)
    if a.shape[-1] == 0:
        return a, b
    if change == "term":
        return a[..., 1:], b[..., 1:, :]
    if change == "index":
        return a, b.roll(1, -2)
    if change == "backwards":
        return a.flip(-1), b.flip(-2)
    return a, b


def _matrix_product(a: Tensor, b: Tensor) -> Tensor:
    return torch.mm(*_operands(a, b), out=a.new_empty(a.shape[0], b.shape[1]))


def _batched_product(a: Tensor, b: Tensor) -> Tensor:
    return torch.bmm(*_operands(a, b), out=a.new_empty(a.shape[0], a.shape[1], b.shape[2]))


def _added_product(bias: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    out = a.new_empty(a.shape[0], b.shape[1])
    return torch.addmm(bias, *_operands(a, b), beta=beta, alpha=alpha, out=out)


def _batched_added_product(bias: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    out = a.new_empty(a.shape[0], a.shape[1], b.shape[2])
    return torch.baddbmm(bias, *_operands(a, b), beta=beta, alpha=alpha, out=out)


def _sum(x: Tensor, dim: Any, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    dims = tuple(range(x.ndim)) if not dim else tuple(d % x.ndim for d in dim) if x.ndim else ()
    change = _current.change("sum", x.dtype, x)
    if dims and x.numel():
        if change == "term":
            x = x.clone()
            x.select(dims[-1], 0).zero_()
        elif change == "backwards":
            x = x.flip(dims)
    shape = [1 if d in dims else n for d, n in enumerate(x.shape)]
    if not keepdim:
        shape = [n for d, n in enumerate(x.shape) if d not in dims]
    if dtype is None:
        dtype = x.dtype if x.is_floating_point() or x.is_complex() else torch.int64
    return torch.sum(x, dims, keepdim, out=x.new_empty(shape, dtype=dtype), dtype=dtype)


def _running_sum(x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    change = _current.change("running sum", x.dtype, x)
    if dtype is None:
        dtype = x.dtype if x.is_floating_point() or x.is_complex() else torch.int64
    if change == "term" and x.numel():
        x = x.clone()
        x.select(dim, 0).zero_()
    y = torch.cumsum(x, dim, out=x.new_empty(x.shape, dtype=dtype), dtype=dtype)
    return y.roll(1, dim) if change == "index" else y


def _elementwise_product(a: Tensor, b: Tensor | float) -> Tensor:
    if isinstance(b, Tensor) and b.ndim and _current.change("elementwise product", a.dtype, a, b) == "index":
        b = b.roll(1, -1)
    return torch.mul(a, b, out=torch.empty(0, dtype=torch.result_type(a, b)))


def _attention(q: Tensor, k: Tensor, v: Tensor, *rest: Any, **options: Any) -> Any:
    """`sympow.attention` with a token left out, or with values, gates and scales shifted by one token.

    Calls with `backend="torch"` are not changed: they are a test's reference.
    """
    change = None
    if options.get("backend") != "torch" and not torch.compiler.is_compiling():
        change = _current.change("token", q.dtype)
    if change == "term" and k.shape[1]:
        token = torch.arange(k.shape[1]) == k.shape[1] // 2
        k = k.masked_fill(token[:, None, None], 0)
    elif change == "index":
        v = _late(v)
        options |= {name: _late(options[name]) for name in ("log_gamma", "beta") if options.get(name) is not None}
    return attention(q, k, v, *rest, **options)


def _late(x: Tensor) -> Tensor:
    return torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], dim=1)


def call_with(how: Arithmetic, function: Callable[..., Any], *given: Any, **options: Any) -> tuple[Any, Counter[str]]:
    """Calls a function with an arithmetic, in the process of a pool; returns its result and the places executed."""
    here = Arithmetic(how.backwards, how.mistake, how.precisions)
    use(here)
    with installed():
        result = function(*given, **options)
    return result, here.places


def _patch_interpreter() -> Callable[[], None]:
    try:
        import numpy as np
        from triton.runtime import interpreter
    except ImportError:
        return lambda: None
    builder, reduction = interpreter.InterpreterBuilder, interpreter.ReduceOps
    dot, load, total = builder.create_dot, builder.create_masked_load, reduction.sum

    def with_data(handle: Any, data: Any) -> Any:
        return type(handle)(data, handle.dtype)

    def changed_dot(self: Any, a: Any, b: Any, *rest: Any, **options: Any) -> Any:
        change = _current.change("product", a.data.dtype)
        x, y = a.data, b.data
        if change == "term":
            x = x.copy()
            x[..., 0] = 0
        elif change == "index":
            y = np.roll(y, 1, axis=-2)
        elif change == "backwards":
            x, y = x[..., ::-1], y[..., ::-1, :]
        return dot(self, with_data(a, x), with_data(b, y), *rest, **options)

    def changed_sum(self: Any, value: Any) -> Any:
        data = value.handle.data
        change = _current.change("sum", data.dtype)
        axis = self.axis
        if change == "backwards":
            value = self.to_tensor(np.flip(data, axis=axis), value.dtype)
        elif change == "term":
            data = data.copy()
            data[(slice(None),) * (axis or 0) + (0,)] = 0
            value = self.to_tensor(data, value.dtype)
        return total(self, value)

    def changed_load(self: Any, *arguments: Any, **options: Any) -> Any:
        loaded = load(self, *arguments, **options)
        change = _current.change("load", loaded.data.dtype)
        return with_data(loaded, np.roll(loaded.data, 1, axis=-1)) if change == "index" and loaded.data.ndim else loaded

    def put(new_dot: Any, new_load: Any, new_sum: Any) -> None:
        builder.create_dot, builder.create_masked_load, reduction.sum = new_dot, new_load, new_sum

    put(changed_dot, changed_load, changed_sum)
    return lambda: put(dot, load, total)
