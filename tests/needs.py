"""What some tests need of the machine: skipped with the reason where it is missing."""

from __future__ import annotations

import pytest

from headrace import sandbox
from headrace.errors import SandboxError

try:
    sandbox.check_system()
    WHY_NO_SANDBOX = ""
except SandboxError as error:
    WHY_NO_SANDBOX = str(error)
needs_sandbox = pytest.mark.skipif(bool(WHY_NO_SANDBOX), reason=WHY_NO_SANDBOX)
