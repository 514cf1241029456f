"""HTML reports: what ranks hold, compute and send under each schedule, and the results of a `generate` run."""

from attnmesh.report.data import GeneratedAnswer, GenerationReport, ScheduleReport, generation_report, schedule_report
from attnmesh.report.page import write_report

__all__ = [
    "GeneratedAnswer",
    "GenerationReport",
    "ScheduleReport",
    "generation_report",
    "schedule_report",
    "write_report",
]
