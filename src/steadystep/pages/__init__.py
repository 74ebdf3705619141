"""A run as a page: reports and comparisons as one HTML file, and a live dashboard over a folder of runs."""

from steadystep.pages.charts import Thinned, thin
from steadystep.pages.compare import compare_page
from steadystep.pages.report import report_page

__all__ = ["Thinned", "compare_page", "report_page", "thin"]
