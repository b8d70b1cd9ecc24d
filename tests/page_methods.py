"""The file ``my_methods.py`` that ``docs/own-method.md`` has its readers write."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "own-method.md"
METHODS = ("my_methods:Ditto", "my_methods:FedPer")


def write(folder: Path) -> None:
    """Write the page's file into a folder."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    source = next(block for block in blocks if block.startswith("# my_methods.py"))
    (folder / "my_methods.py").write_text(source, encoding="utf-8")
