"""Masks: symbolic evaluation of their elements, and the operator's arguments that they become."""
