"""In the place of torchvision, which PyPI has for CUDA only: a text server imports names of it, and calls none."""

import enum
import sys
import types
from importlib.machinery import ModuleSpec
from typing import Any, ClassVar

__path__: list[str] = []
__version__ = "0.0.0"


class InterpolationMode(enum.Enum):
    """The one thing that is read at import."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


class _Names(types.ModuleType):
    """Has every name: an empty class."""

    __path__: ClassVar[list[str]] = []
    InterpolationMode = InterpolationMode

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


for _name in ("io", "ops", "transforms", "transforms.functional", "transforms.v2", "transforms.v2.functional"):
    _module = sys.modules[f"{__name__}.{_name}"] = _Names(f"{__name__}.{_name}")
    _module.__spec__ = ModuleSpec(_module.__name__, None, is_package=True)
    _parent, _, _last = _module.__name__.rpartition(".")
    setattr(sys.modules[_parent], _last, _module)
