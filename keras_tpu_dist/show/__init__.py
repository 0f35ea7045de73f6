"""How results are drawn: text, HTML, SVG, whole pages, and the progress of long work."""
