"""Plans in loops that others wrote: what Lowtide gives to transformers and Lightning."""
