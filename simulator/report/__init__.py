"""HTML pages of traces, plans and sweeps, made of one small set of blocks and charts."""
