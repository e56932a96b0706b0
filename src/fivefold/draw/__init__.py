"""Drawing: one canvas for SVG pictures, its colours, scales, rows of boxes over time, and curves over two axes."""
