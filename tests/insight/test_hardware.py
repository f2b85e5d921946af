from __future__ import annotations

from pathlib import Path

import pytest

from headrace.errors import ConfigError
from headrace.insight.hardware import find_device, read_hardware


@pytest.mark.parametrize(
    ("name", "memory_gb", "tb_per_s", "tflops"),
    [  # datasheets: SXM modules where there are several, dense bfloat16
        ("A100", 80, 2.039, 312),
        ("h100", 80, 3.35, 989),
        ("H200", 141, 4.8, 989),
        ("B200", 180, 8.0, 2250),
        ("rtx-4090", 24, 1.008, 165),
    ],
)
def test_datasheets(name: str, memory_gb: float, tb_per_s: float, tflops: float):
    device = find_device(name)
    assert device.memory_bytes == memory_gb * 1e9
    assert device.memory_bytes_per_s == pytest.approx(tb_per_s * 1e12)
    assert device.flops_per_s == tflops * 1e12


def test_a_cpu_core_computes_in_float32():
    # 3 GHz x 2 units x 8 numbers x multiply and add
    assert find_device("cpu").flops_per_s == 3e9 * 2 * 8 * 2
    assert find_device("CPU").number_bytes == 4


def test_a_file_changes_and_adds(tmp_path: Path):
    path = tmp_path / "mine.toml"
    path.write_text(
        """
        [h100]
        dollars_per_hour = 2.1
        [MI300X]
        memory_bytes = 192e9
        memory_bytes_per_s = 5.3e12
        flops_per_s = 1307e12
        link_bytes_per_s = 448e9
        network_bytes_per_s = 50e9
        dollars_per_hour = 0
        """
    )
    hardware = read_hardware(path)
    assert hardware["H100"].dollars_per_hour == 2.1
    assert hardware["H100"].flops_per_s == read_hardware()["H100"].flops_per_s
    assert find_device("mi300x", hardware).memory_bytes == 192e9
    assert list(hardware) == [*read_hardware(), "MI300X"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[H100]\nprice = 2", r"mine.toml: \[H100\] has no number price; a device has memory_bytes"),
        ("[H100]\ndollar_per_hour = 2", r"has no number dollar_per_hour; did you mean dollars_per_hour\?"),
        ("[H100]\nmemory_bytes = -1", r"\[H100\] memory_bytes is -1; it must be a number above 0"),
        ("[H100]\nmemory_bytes = true", r"\[H100\] memory_bytes is True; it must be a number above 0"),
        ("[H100]\nmemory_bytes = '80 GB'", r"\[H100\] memory_bytes is '80 GB'; it must be a number above 0"),
        ("[H100]\nnum_per_node = 2.5", "num_per_node is 2.5; it must be a whole number above 0"),
        ("[H100]\nflops_per_s = inf", "flops_per_s is inf; it must be a number above 0"),
        (
            "[MI300X]\nmemory_bytes = 1e9",
            r"\[MI300X\] is not in the table, so it needs every number; memory_bytes_per_s",
        ),
        ("dollars_per_hour = 2", r"dollars_per_hour stands outside of a device; write \[H100\]"),
        ("[H100", "mine.toml is not valid TOML"),
    ],
)
def test_a_bad_file_is_explained(tmp_path: Path, text: str, message: str):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_hardware(path)


def test_a_file_that_is_not_there_is_explained(tmp_path: Path):
    with pytest.raises(ConfigError, match="there is no hardware file"):
        read_hardware(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="it is a directory"):
        read_hardware(tmp_path)


def test_an_unknown_device_is_explained():
    with pytest.raises(ConfigError, match="there is no device 'H900' in the table; it has A100, H100"):
        find_device("H900")
