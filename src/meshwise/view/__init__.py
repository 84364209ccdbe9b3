"""Draw the time and memory of plans: in the terminal, as PNG, SVG, HTML page and trace (docs/view.md)."""
