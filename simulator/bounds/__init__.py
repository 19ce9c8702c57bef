"""What no plan within a budget can beat, certified."""
