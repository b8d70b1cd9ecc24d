"""Every row of the table of what works is shown by a test that exists, and every tested layer and loss has a row."""

import subprocess
import sys
from pathlib import Path

import works

ROOT = Path(__file__).parents[1]


def test_every_row_names_tests_that_exist_and_every_case_has_a_row() -> None:
    named = {test for table in works.tables() for row in table.rows for test in row.tests}
    assert all(row.tests for table in works.tables() for row in table.rows)
    files = sorted({test.partition("::")[0] for test in named})
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-n", "0", "-m", "", *files]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    there = set(done.stdout.splitlines())
    assert not named - there
    layers = {test for test in there if "::test_a_layer_trains_as_in_a_plain_loop[" in test}
    losses = {test for test in there if "::test_a_loss_trains_as_in_a_plain_loop[" in test and "-batched]" in test}
    assert layers
    assert losses
    assert layers | losses <= named
