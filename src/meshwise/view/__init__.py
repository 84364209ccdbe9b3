"""What is drawn: in the terminal, as SVG and PNG."""
