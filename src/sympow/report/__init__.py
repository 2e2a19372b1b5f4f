"""Everything that draws or prints: terminal tables, matplotlib figures and HTML pages."""
