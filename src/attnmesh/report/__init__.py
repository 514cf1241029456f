"""`attnmesh report`: what ranks hold, compute and send, as one page that opens anywhere."""

from attnmesh.report.data import Report, make_report
from attnmesh.report.page import write_report

__all__ = ["Report", "make_report", "write_report"]
