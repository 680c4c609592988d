"""Attention over several devices, on torch.distributed."""
