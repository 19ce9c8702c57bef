"""Runs of all kinds (predicted, rehearsed, recorded, measured) in one form: to be explained, compared and handed on."""
