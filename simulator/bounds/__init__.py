"""Turn a Trace and a budget into what no plan can beat, certified."""
