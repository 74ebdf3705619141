"""HTML pages of runs: reports and comparisons as one file, and a live dashboard over a folder of runs.

`Library` and `make_app` load on first use: the server needs `pip install 'steadystep[dashboard]'`.
"""

from typing import TYPE_CHECKING

from steadystep._utils import lazy_names
from steadystep.pages.charts import Thinned, thin
from steadystep.pages.report import compare_page, report_page

if TYPE_CHECKING:
    from steadystep.pages.library import Library
    from steadystep.pages.server import make_app

__all__ = ["Library", "Thinned", "compare_page", "make_app", "report_page", "thin"]

__getattr__ = lazy_names(__name__, {"library": ("Library",), "server": ("make_app",)})
