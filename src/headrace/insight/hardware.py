"""What devices can do and what they cost.

Speeds and sizes are the datasheets' (matrix products of dense bfloat16, one direction of each link); what a program
reaches of them is a matter of efficiency, in `roofline.py`. Prices are typical on-demand list prices of 2026, a device
and hour. Providers differ by a factor of three and change them often, so write your own into a file:

    [H100]
    dollars_per_hour = 2.10

    [MI300X]                      # a device that is not in the table needs every number
    memory_bytes = 192e9
    memory_bytes_per_s = 5.3e12
    flops_per_s = 1307e12
    link_bytes_per_s = 448e9
    network_bytes_per_s = 50e9
    dollars_per_hour = 2.50
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from headrace.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One accelerator, or one core of a CPU.

    Example:
        Device(name="H100", memory_bytes=80e9, memory_bytes_per_s=3.35e12, flops_per_s=989e12, link_bytes_per_s=450e9,
               network_bytes_per_s=50e9, dollars_per_hour=3.0)
    """

    name: str
    memory_bytes: float
    memory_bytes_per_s: float
    flops_per_s: float
    link_bytes_per_s: float  # to a device of the same node
    network_bytes_per_s: float  # to another node, this device's part of the node's network
    dollars_per_hour: float
    num_per_node: int = 8
    number_bytes: int = 2  # of a weight: 2 is bfloat16, 4 float32


def _known(name: str, *numbers: float, num_per_node: int = 8, number_bytes: int = 2) -> Device:
    memory, memory_per_s, flops_per_s, link_per_s, network_per_s, dollars_per_hour = numbers
    return Device(
        name=name,
        memory_bytes=memory,
        memory_bytes_per_s=memory_per_s,
        flops_per_s=flops_per_s,
        link_bytes_per_s=link_per_s,
        network_bytes_per_s=network_per_s,
        dollars_per_hour=dollars_per_hour,
        num_per_node=num_per_node,
        number_bytes=number_bytes,
    )


# The A100 and H100 nodes have one network card of 200 and 400 Gbit/s per GPU. The 4090 has PCIe 4.0 and an assumed
# network of 10 Gbit/s. The core is one of a server: 3 GHz, two 8-wide fused multiply-adds a cycle, its part of the
# memory and of a network of 25 Gbit/s.
BUILT_IN = (
    _known("A100", 80e9, 2.039e12, 312e12, 300e9, 25e9, 1.5),
    _known("H100", 80e9, 3.35e12, 989e12, 450e9, 50e9, 3.0),
    _known("H200", 141e9, 4.8e12, 989e12, 450e9, 50e9, 3.5),
    _known("B200", 180e9, 8e12, 2250e12, 900e9, 50e9, 5.0),
    _known("RTX 4090", 24e9, 1.008e12, 165e12, 32e9, 1.25e9, 0.5, num_per_node=4),
    _known("CPU", 4e9, 10e9, 96e9, 10e9, 0.2e9, 0.05, num_per_node=16, number_bytes=4),
)

NUMBERS = tuple(field.name for field in fields(Device) if field.name != "name")
REQUIRED = tuple(field.name for field in fields(Device) if field.name != "name" and field.default is MISSING)
WHOLE = ("num_per_node", "number_bytes")

Hardware = Mapping[str, Device]


def built_in() -> dict[str, Device]:
    """The table, by name."""
    return {device.name: device for device in BUILT_IN}


def find_device(name: str, hardware: Hardware | None = None) -> Device:
    """The device of that name, however it is spelt: H100, h100, rtx4090, RTX-4090."""
    known = built_in() if hardware is None else hardware
    match = _known_as(name, known)
    if match is None:
        raise ConfigError(
            f"there is no device {name!r} in the table; it has {', '.join(known)}. A hardware file can add one."
        )
    return known[match]


def read_hardware(path: Path | str | None) -> dict[str, Device]:
    """The table with the changes and additions of a TOML file; without a file, the table."""
    table = built_in()
    if path is None:
        return table
    for name, entry in _tables(Path(path)).items():
        if not isinstance(entry, dict):
            raise ConfigError(f"{path}: {name} stands outside of a device; write [H100] or another name above it")
        numbers = {key: _number(path, name, key, value) for key, value in entry.items()}
        match = _known_as(name, table)
        if match is not None:
            table[match] = replace(table[match], **numbers)
            continue
        missing = [key for key in REQUIRED if key not in numbers]
        if missing:
            raise ConfigError(
                f"{path}: [{name}] is not in the table, so it needs every number; {', '.join(missing)} missing"
            )
        table[name] = Device(name=name, **numbers)
    return table


def _tables(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"there is no hardware file {path}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    except (OSError, UnicodeDecodeError) as error:
        reason = "it is a directory" if path.is_dir() else str(error)
        raise ConfigError(f"cannot read {path}: {reason}") from error


def _number(path: Path | str, name: str, key: str, value: Any) -> Any:
    if key not in NUMBERS:
        near = get_close_matches(key, NUMBERS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"a device has {', '.join(NUMBERS)}"
        raise ConfigError(f"{path}: [{name}] has no number {key}; {hint}")
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    large_enough = is_number and (value > 0 or (key == "dollars_per_hour" and value == 0))
    if not large_enough or (key in WHOLE and value != int(value)):
        kind = "a whole number above 0" if key in WHOLE else "a number above 0"
        raise ConfigError(f"{path}: [{name}] {key} is {value!r}; it must be {kind}")
    return int(value) if key in WHOLE else float(value)


def _known_as(name: str, known: Hardware) -> str | None:
    """The spelling in the table."""
    spelt = {_plain(other): other for other in known}
    return spelt.get(_plain(name))


def _plain(name: str) -> str:
    return "".join(letter for letter in name.casefold() if letter.isalnum())
