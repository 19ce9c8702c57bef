"""Turn traces, plans and sweeps into HTML pages."""
