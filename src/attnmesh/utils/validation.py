"""Checks of arguments: each raises ValueError with the argument, its value and what is allowed.

A check takes names and values, and builds the words of an error when it raises it: valid calls format nothing.
Checks of calls over ranks run on every rank before anything is sent: only a ValueError reaches the other ranks.
"""

from __future__ import annotations

import math
import re
import reprlib
import sys
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import is_dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

MAX_COUNT = 2**31 - 1
"""The largest size of a dimension or length of a sequence: indices are int32, and products of two counts fit int64."""
MAX_RANKS = 2**16
"""The largest number of ranks: plans have an entry for each."""
MAX_TIMEOUT = 1_000_000
"""The longest timeout in seconds, eleven days: torch.distributed counts milliseconds in 32 bits."""
MAX_FLOAT32 = torch.finfo(torch.float32).max


class _Shortened(reprlib.Repr):
    """`repr` of limited length, in which tensors and arrays are not read."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxstring, self.maxother, self.maxlong = 3, 100, 100, 60

    def repr1(self, x: Any, level: int) -> str:
        if isinstance(x, Tensor):
            return f"{str(x.dtype).removeprefix('torch.')} tensor {list(x.shape)} on {x.device}"
        if type(x).__module__ == "numpy" and hasattr(x, "shape") and x.shape:
            return f"numpy array {x.dtype} {list(x.shape)}"
        fields = x._asdict() if hasattr(x, "_asdict") else vars(x) if is_dataclass(x) else {}
        if any(isinstance(field, Tensor) for field in fields.values()):
            return f"{type(x).__name__}({', '.join(f'{name}={self.repr1(x, level)}' for name, x in fields.items())})"
        return super().repr1(x, level)


_shortened = _Shortened()


def shown(value: object) -> str:
    """A value as error messages show it: short, on one line, without reading tensors."""
    try:
        return " ".join(_shortened.repr(value).split())
    except Exception:  # an integer of thousands of digits, or a type with a faulty __repr__
        return f"a value of type {type(value).__name__}"


_PACKAGE = str(Path(__file__).parents[1])


def warn_caller(text: str) -> None:
    """A UserWarning at the line of the caller that is outside of this package."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, UserWarning, stacklevel=level)


def check_count(name: str, n: object, least: int = 0, most: int = MAX_COUNT) -> int:
    """Return `n`; raise ValueError unless it is an integer from `least` to `most`."""
    if not isinstance(n, int) or isinstance(n, bool) or n < least:
        raise ValueError(f"{name} must be an integer >= {least}, got {shown(n)}")
    if n > most:
        raise ValueError(f"{name} must be at most {most}, got {shown(n)}")
    return n


def check_positive(**counts: object) -> None:
    """Raise ValueError unless all arguments are positive integers."""
    for name, n in counts.items():
        if not isinstance(n, int) or isinstance(n, bool) or n < 1:
            raise ValueError(f"{name} must be a positive integer, got {shown(n)}")
        check_count(name, n)


def check_index(name: str, n: object, size: int, of: object = None) -> int:
    """Return `n`; raise ValueError unless it is an integer from 0 to `size` - 1. The message names `of`, if given."""
    if not isinstance(n, int) or isinstance(n, bool) or not 0 <= n < size:
        raise ValueError(f"{name} must be 0 to {size - 1}{'' if of is None else f' for {of}'}, got {shown(n)}")
    return n


def is_number(x: object) -> bool:
    """Whether `x` is a finite number that fits a float; True and False are none."""
    if not isinstance(x, float | int) or isinstance(x, bool):
        return False
    try:
        return math.isfinite(x)
    except OverflowError:
        return False


def check_number(name: str, x: object, above: float | None = None, least: float | None = None) -> float:
    """Return `x` as a float; raise ValueError unless it is a finite number, above `above` and at least `least`.

    Kernels take float32: larger numbers would be infinite there.
    """
    if isinstance(x, float | int) and is_number(x) and (above is None or x > above) and (least is None or x >= least):
        if not -MAX_FLOAT32 <= x <= MAX_FLOAT32:
            raise ValueError(f"{name} must be at most {MAX_FLOAT32:.4g} in magnitude, got {shown(x)}")
        return float(x)
    if above == 0:
        raise ValueError(f"{name} must be a positive number, got {shown(x)}")
    limit = f" above {above:g}" if above is not None else "" if least is None else f" of at least {least:g}"
    raise ValueError(f"{name} must be a finite number{limit}, got {shown(x)}")


def check_timeout(timeout: object) -> float:
    """Return `timeout` as a float; raise ValueError unless it is a number of seconds that a rank can wait for."""
    if isinstance(timeout, float | int) and not isinstance(timeout, bool) and 0 < timeout <= MAX_TIMEOUT:
        return float(timeout)
    raise ValueError(f"timeout must be positive seconds, at most {MAX_TIMEOUT:,}, got {shown(timeout)}")


def check_bool(**flags: object) -> None:
    """Raise ValueError unless all arguments are True or False."""
    for name, flag in flags.items():
        if flag is not True and flag is not False:
            raise ValueError(f"{name} must be True or False, got {shown(flag)}")


def check_options(function: str, options: Iterable[str], allowed: type) -> None:
    """Raise TypeError, as Python does, for a keyword that is no field of the TypedDict `allowed`."""
    for name in options:
        if name not in allowed.__annotations__:
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")


def check_choice(name: str, value: object, allowed: Iterable[str]) -> None:
    """Raise ValueError unless `value` is one of the allowed strings."""
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {shown(value)}")


def check_type(name: str, value: object, kind: type | tuple[type, ...], what: str | None = None) -> None:
    """Raise ValueError unless `value` is of a type; `what` describes it in the message."""
    if not isinstance(value, kind):
        kinds = kind if isinstance(kind, tuple) else (kind,)
        raise ValueError(f"{name} must be {what or ' or '.join(k.__name__ for k in kinds)}, got {shown(value)}")


def check_tensor(name: str, x: object, shape: str = "") -> Tensor:
    """Return `x`; raise ValueError unless it is a dense tensor. `shape` describes it in the message."""
    if not isinstance(x, Tensor):
        raise ValueError(f"{name} must be a tensor{shape and ' ' + shape}, got {type(x).__name__} {shown(x)}")
    if x.is_nested:
        raise ValueError(f"{name} must be a dense tensor, got a nested tensor")
    if x.layout is not torch.strided:
        raise ValueError(f"{name} must be a dense tensor, got {shown(x)} with layout {x.layout}")
    if hasattr(x, "to_local"):
        raise ValueError(f"{name} must be a plain tensor, got a DTensor: pass this rank's part of it, x.to_local()")
    return x


def check_list(name: str, items: object, what: str) -> list[Any]:
    """Return `items` as a list; raise ValueError unless they are in a list, a tuple or another iterable of items."""
    if isinstance(items, Iterable) and not isinstance(items, str | bytes | Tensor | Mapping):
        try:
            return list(items)
        except TypeError:  # an array without dimensions
            pass
    raise ValueError(f"{name} must be a list of {what}, got {shown(items)}")


def check_shape(name: str, shape: object) -> tuple[int, ...]:
    """Return `shape` as a tuple; raise ValueError unless it is a list of sizes of a tensor that can exist."""
    sizes = tuple(check_list(name, shape, "sizes"))
    if all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in sizes) and math.prod(sizes) < 2**60:
        return sizes
    raise ValueError(f"{name} must be a list of sizes >= 0, got {shown(shape)}")


def check_dtype(name: str, dtype: object) -> torch.dtype:
    """Return `dtype`; raise ValueError unless it is a floating point dtype of torch."""
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"{name} must be a floating point torch.dtype, got {shown(dtype)}")
    return dtype


def check_device(name: str, device: object) -> torch.device:
    """Return `device` as a torch.device; raise ValueError if it names none."""
    if isinstance(device, torch.device):
        return device
    if isinstance(device, str):
        try:
            return torch.device(device)
        except RuntimeError:
            pass
    raise ValueError(f"{name} must be a torch device such as 'cpu' or 'cuda:0', got {shown(device)}")


def check_path(name: str, path: object) -> Path:
    """Return `path` as a Path; raise ValueError unless it is a string or a path, and not empty."""
    if isinstance(path, str | Path) and str(path):
        return Path(path)
    raise ValueError(f"{name} must be a path, got {shown(path)}")


_SUFFIX = {"": 1, "k": 1024, "m": 1024**2}
_WRITTEN = re.compile(r"([0-9]+(?:\.[0-9]{1,18})?)([kKmM]?)", re.ASCII)


def parse_length(text: str, *, most: int = MAX_COUNT) -> int:
    """Parse a sequence length such as `100000`, `128k` or `1.5M`; k is 1024 and M is 1024 * 1024."""
    match = _WRITTEN.fullmatch(text.strip())
    if match is not None:
        digits = match[1].lstrip("0")
        count = Fraction(match[1]) * _SUFFIX[match[2].lower()] if len(digits) < 100 else most + 1
        if count > most:
            raise ValueError(f"a length must be at most {most}, got {shown(text)}")
        if int(count) == count > 0:
            return int(count)
    raise ValueError(f"a length must be a whole number above 0, such as 100000, 128k or 1.5M, got {text!r}")
