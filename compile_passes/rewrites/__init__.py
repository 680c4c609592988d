"""Other forms of attention, rewritten before it is matched, and undone where nothing is fused."""
