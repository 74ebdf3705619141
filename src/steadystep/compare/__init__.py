"""Several runs side by side: what differs, and which is better by how much, as far as the noise lets one say."""

from steadystep.compare.comparison import Comparison, compare
from steadystep.compare.level import Level, level
from steadystep.compare.page import compare_page

__all__ = ["Comparison", "Level", "compare", "compare_page", "level"]
