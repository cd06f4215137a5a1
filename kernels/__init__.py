"""Kernels, the facts about the GPUs they run on, and the harness that measures them."""
