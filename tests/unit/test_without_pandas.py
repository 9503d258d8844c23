"""No command pays for the import of pandas, which pyarrow would try."""

from __future__ import annotations

import json
import subprocess
import sys

# Prints whether pandas was imported by conversions that would import it, and what pyarrow does after pandas is there.
PROGRAM = """
import json, sys
import cutline.columns.arrow_numbers
import numpy as np, pyarrow as pa
made = [pa.array([1, None]).to_pylist(), pa.array(np.arange(2)).to_pylist(), pa.scalar(3).as_py()]
before = "pandas" in sys.modules
import pandas
print(json.dumps([made, before, pa.array(["a"]).to_pylist(), bool(pandas.Series([1]).sum() == 1)]))
"""


def test_pyarrow_does_not_import_it_and_others_still_may() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [[[1, None], [0, 1], 3], False, ["a"], True]
