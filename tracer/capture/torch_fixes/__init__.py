"""What torch captures wrongly, one upstream bug a file."""
