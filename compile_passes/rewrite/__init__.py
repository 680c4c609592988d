"""Replacing an attention by one call: its operands and masks as nodes, and verification."""
