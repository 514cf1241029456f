"""HTML reports: what ranks hold, compute and send under each schedule, and the results of a `generate` run."""

from attnmesh.report.data import GeneratedAnswer, GenerationReport, Report, generation_report, make_report
from attnmesh.report.page import write_report

__all__ = ["GeneratedAnswer", "GenerationReport", "Report", "generation_report", "make_report", "write_report"]
