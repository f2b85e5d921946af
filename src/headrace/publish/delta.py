"""Which elements changed, where and by how much, in a byte or a little more for each of the two.

A step of RL at a small learning rate leaves most bfloat16 weights as they were, to the bit, and moves the others to the
next number or near it. A place is the gap to the one
before; a change is the difference of the bits as integers. Both are written in groups of seven bits, the last group
below 128: one byte up to 127, two up to 16,383, three up to two million. So a place takes less than three bytes on
average while more than one weight in half a million changes.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from headrace.errors import PublishError

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}  # 8 bytes count as two elements
_GROUP = 7
_MORE = 1 << _GROUP


def bits(tensor: Tensor) -> Tensor:
    """A contiguous tensor's own memory, flat, as integers."""
    return tensor.detach().view(-1).view(_BITS[tensor.element_size()])


def changed_places(new: Tensor, old: Tensor) -> Tensor:
    """Where two flat tensors of bits differ, in order."""
    differs = new != old
    if differs.is_cuda:
        return differs.nonzero().flatten()
    return torch.from_numpy(np.flatnonzero(differs.numpy()))  # several times as fast as torch's


def code_places(places: Tensor) -> Tensor:
    """Places in rising order, as bytes: how many elements each passes over."""
    return _code(places.diff(prepend=places.new_full((1,), -1)) - 1)


def read_places(coded: Tensor, num_places: int, num_elements: int) -> Tensor:
    """The places again. Raises if they are not so many, or not all within the tensor."""
    places = (_read(coded, num_places) + 1).cumsum(0) - 1
    if num_places and not 0 <= int(places[-1]) < num_elements:
        raise PublishError(f"place {int(places[-1])} is outside a tensor of {num_elements} elements")
    return places


def code_changes(new: Tensor, old: Tensor) -> Tensor:
    """What to add to the old bits to have the new ones, as bytes; small numbers of either sign are short."""
    by = (new - old).long()
    return _code((by << 1) ^ (by >> 63))


def read_changes(coded: Tensor, num_changes: int, dtype: torch.dtype) -> Tensor:
    """What to add again. Sums of bits wrap around, so the new bits come out whatever the old ones were."""
    zigzag = _read(coded, num_changes)
    return ((zigzag >> 1) ^ -(zigzag & 1)).to(dtype)


def _code(numbers: Tensor) -> Tensor:
    lengths = torch.ones_like(numbers)
    for length in range(1, 9):
        longer = numbers >= 1 << (_GROUP * length)
        if not bool(longer.any()):
            break
        lengths += longer
    ends = lengths.cumsum(0)
    starts = ends - lengths
    coded = torch.empty(int(ends[-1]) if len(ends) else 0, dtype=torch.uint8, device=numbers.device)
    for index in range(int(lengths.max()) if len(lengths) else 0):
        here = (lengths > index).nonzero().flatten() if index else slice(None)
        more = (lengths[here] > index + 1) * _MORE
        coded[starts[here] + index] = ((numbers[here] >> (_GROUP * index)) & (_MORE - 1) | more).to(torch.uint8)
    return coded


def _read(coded: Tensor, count: int) -> Tensor:
    ends = (coded < _MORE).nonzero().flatten()
    if len(ends) != count or (count and int(ends[-1]) != len(coded) - 1):
        raise PublishError(f"{len(ends)} numbers are coded in place of {count}")
    starts = torch.cat([ends.new_zeros(1), ends[:-1] + 1])[:count]
    lengths = ends - starts + 1
    numbers = (coded[starts] & (_MORE - 1)).long()
    for index in range(1, int(lengths.max()) if count else 0):
        here = (lengths > index).nonzero().flatten()
        numbers[here] |= (coded[starts[here] + index] & (_MORE - 1)).long() << (_GROUP * index)
    return numbers
