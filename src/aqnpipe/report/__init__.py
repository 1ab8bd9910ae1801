"""Report: figures and one self-contained HTML page."""
