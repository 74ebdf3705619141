"""First weights: named recipes for any module tree, and a look at a model before its first step."""

from steadystep.init.check import check_init
from steadystep.init.initialise import Recipe, initialise_
from steadystep.init.report import InitReport, LayerScale
from steadystep.init.table import InitRow, InitTable

__all__ = ["InitReport", "InitRow", "InitTable", "LayerScale", "Recipe", "check_init", "initialise_"]
