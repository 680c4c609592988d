"""Functions of scores as programs: read, split into terms and the rest, and analysed."""
