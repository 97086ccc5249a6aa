"""Trains tiny-k3, a small model with Kimi-K3's architecture and checkpoint layout.

`python -m tools.train_tiny_k3 --help` shows the options; README.md tells the rest. Nothing here
is imported by reap itself.
"""
