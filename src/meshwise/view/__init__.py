"""Draw plans: in the terminal, as PNG and SVG, as an HTML page and as a trace. docs/view.md."""
