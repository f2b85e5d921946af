from __future__ import annotations

import pytest
from tiny_runs import Workshop


@pytest.fixture(scope="session")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    """What whole runs are made from."""
    return Workshop(tmp_path_factory.mktemp("runs"))
