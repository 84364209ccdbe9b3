"""Drawings: in the terminal, as PNG and SVG, as a page for a browser, as a trace. docs/view.md."""
