"""Fit a Mixture-of-Experts language model into the memory you have.

The stages talk only through files: calibrate → plan → export → evaluate → report.
"""

__version__ = "0.1.0"
