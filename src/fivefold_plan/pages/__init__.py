"""Plans as pages: text for the terminal, SVG pictures, and one offline HTML page."""
