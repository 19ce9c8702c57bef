"""Plans in loops that others wrote: what Lowtide gives to transformers, Lightning, DDP and Inductor."""
