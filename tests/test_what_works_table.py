"""Every row of the table of what works is shown by a test that exists, and every tested layer and loss has a row."""

from pathlib import Path

import pytest
import works

ROOT = Path(__file__).parents[1]


class Collected:
    """A plugin that keeps the names of the tests that pytest finds."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        self.names |= {item.nodeid for item in items}


def test_every_row_names_tests_that_exist_and_every_case_has_a_row() -> None:
    named = {test for table in works.tables() for row in table.rows for test in row.tests}
    assert all(row.tests for table in works.tables() for row in table.rows)
    files = sorted({test.partition("::")[0] for test in named})
    found = Collected()
    paths = [str(ROOT / file) for file in files]
    status = pytest.main(["--collect-only", "-qq", "-n", "0", "-m", "", "--rootdir", str(ROOT), *paths], [found])
    assert status == pytest.ExitCode.OK
    there = found.names
    assert not named - there
    layers = {test for test in there if "::test_a_layer_trains_as_in_a_plain_loop[" in test}
    losses = {test for test in there if "::test_a_loss_trains_as_in_a_plain_loop[" in test and "-batched]" in test}
    assert layers
    assert losses
    assert layers | losses <= named
