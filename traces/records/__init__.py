"""What a trace, a plan, a measurement and a device profile are: frozen records, each with its file."""
