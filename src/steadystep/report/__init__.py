"""A run as a page: one HTML file that opens from disk, with nothing fetched from anywhere."""

from steadystep.report.page import report_page
from steadystep.report.thinning import Thinned, thin

__all__ = ["Thinned", "report_page", "thin"]
