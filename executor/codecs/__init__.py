"""Codecs: saved values as smaller payloads; `payloads` has the two ops."""
