"""A run shown: read from its folder, drawn in the terminal, written as one HTML file or as text for an issue. No torch."""
