from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import headrace.insight


def test_insight_runs_without_torch():
    """The whole room in a fresh process: a laptop without a GPU library starts it at once."""
    modules = sorted(path.stem for path in Path(headrace.insight.__file__).parent.glob("*.py"))
    imports = "; ".join(f"import headrace.insight.{module}" for module in modules if module != "__init__")
    check = "import sys; bad = {'torch', 'transformers'} & set(sys.modules); sys.exit(str(bad) if bad else 0)"
    done = subprocess.run([sys.executable, "-c", f"{imports}; {check}"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
