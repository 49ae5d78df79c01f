"""The page's files, as a browser gets them: hand-written modules, and uPlot (its licence is in uplot.LICENSE.txt)."""
