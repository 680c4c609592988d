"""Finding or making what runs a call."""
