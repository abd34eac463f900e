"""The report of a run: `report.json` (`make_report`), its figures, and `report.html` (`write_report`)."""

from .build import make_report, task_entry, write_report_json
from .figures import save_figures
from .page import render, write_report
from .schema import Report, parse_scores, read_report
from .terminal import drift_table, print_summary, summary_table
from .words import headline, worse_tasks

__all__ = [
    "Report",
    "drift_table",
    "headline",
    "make_report",
    "parse_scores",
    "print_summary",
    "read_report",
    "render",
    "save_figures",
    "summary_table",
    "task_entry",
    "worse_tasks",
    "write_report",
    "write_report_json",
]
