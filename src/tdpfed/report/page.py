"""One HTML page that holds everything it needs: style, data, plotly.js and the script that draws.

Data go in as JSON and reach the page as text nodes only, so what a run folder says is never markup. The page forbids
itself, by a content security policy, every script but its own two and everything from a network.
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
    """Return the page; one that is kept up to date reloads itself every so many seconds."""
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
    methods = list(dict.fromkeys(group.algorithm for group in groups))
    datasets = list(dict.fromkeys(group.dataset for group in groups))
    return f"{', '.join(methods) if len(methods) < 4 else f'{len(methods)} methods'} on {', '.join(datasets)}"


def _asset(name: str) -> str:
    return (resources.files("tdpfed.report") / name).read_text(encoding="utf-8").replace("\r\n", "\n")


def _plotly() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise TDPFedError("report: needs plotly, not installed; pip install 'tdpfed[report]'") from error
    source: str = get_plotlyjs()
    return source.replace("\r\n", "\n")


def _json(data: dict[str, Any]) -> str:
    """Return JSON in which no tag can begin or end."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _hash(script: str) -> str:
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return f"'sha256-{digest}'"
