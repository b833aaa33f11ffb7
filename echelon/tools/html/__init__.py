"""Common parts of all HTML pages: style sheet, templates, bars, and a horizontal time scale."""
