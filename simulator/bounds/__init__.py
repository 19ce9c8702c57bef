"""Certify what no plan within a budget can beat."""
