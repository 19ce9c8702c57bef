"""Mend what torch captures wrongly, one upstream bug a file."""
