"""The common language: the records that cross a process boundary, and the gallery of recorded traces."""
