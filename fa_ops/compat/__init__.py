"""Functions with the names and arguments of other libraries, for code written for these."""
