"""Reports: run folders, finished or in progress, as one HTML page, as figures and as tables."""

from tdpfed.report.group import Group, group_runs
from tdpfed.report.read import Run, read_run, read_runs
from tdpfed.report.write import Report, check_export, export, follow, write_page

__all__ = [
    "Group",
    "Report",
    "Run",
    "check_export",
    "export",
    "follow",
    "group_runs",
    "read_run",
    "read_runs",
    "write_page",
]
