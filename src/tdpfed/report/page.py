"""A self-contained HTML page: style, data, plotly.js and the script that draws.

Data are embedded as JSON and shown as text nodes only, so text from a run folder is never interpreted as markup. A
content security policy allows only the page's own two scripts and nothing from the network.
"""

import base64
import hashlib
import html
import json
import re
from collections.abc import Sequence
from datetime import datetime
from importlib import resources
from typing import Any

import tdpfed
from tdpfed.errors import TDPFedError
from tdpfed.report.group import Group
from tdpfed.report.payload import payload


def render(groups: Sequence[Group], notes: Sequence[str], *, reload_every: float = 0.0) -> str:
    """Return the page; if ``reload_every`` is positive, it reloads itself after that many seconds."""
    made = datetime.now().astimezone()
    data = {
        **payload(groups),
        "made": f"{made:%Y-%m-%d %H:%M:%S}",
        "version": tdpfed.__version__,
        "notes": list(notes),
        "live": reload_every,
    }
    parts = {
        "title": html.escape(_title(groups)),
        "css": _asset("page.css"),
        "data": _json(data),
        "plotly": _plotly(),
        "script": _asset("charts.js") + _asset("page.js"),
    }
    parts["hashes"] = " ".join(_hash(parts[name]) for name in ("plotly", "script"))
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _asset("page.html"))


def _title(groups: Sequence[Group]) -> str:
    methods = list(dict.fromkeys(group.method for group in groups))
    datasets = list(dict.fromkeys(group.dataset for group in groups))
    return f"{', '.join(methods) if len(methods) < 4 else f'{len(methods)} methods'} on {', '.join(datasets)}"


def _asset(name: str) -> str:
    return (resources.files("tdpfed.report") / name).read_text(encoding="utf-8").replace("\r\n", "\n")


def _plotly() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise TDPFedError("report: plotly is not installed; pip install 'tdpfed[report]'") from error
    source: str = get_plotlyjs()
    return source.replace("\r\n", "\n")


def _json(data: dict[str, Any]) -> str:
    """Return JSON that cannot contain an HTML tag."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _hash(script: str) -> str:
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return f"'sha256-{digest}'"
