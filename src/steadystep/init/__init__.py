"""Weight initialization: named recipes for any module tree, and a check of a model before its first step."""

from steadystep.init.check import check_init
from steadystep.init.findings import InitReport, LayerScale
from steadystep.init.initialise import InitRow, InitTable, Recipe, initialise_

__all__ = ["InitReport", "InitRow", "InitTable", "LayerScale", "Recipe", "check_init", "initialise_"]
