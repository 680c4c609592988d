"""Compilation by NVRTC, the cache of compiled kernels, and launches through the CUDA driver."""
