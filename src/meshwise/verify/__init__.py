"""Prove that the split model is the same model: train a few steps under a plan and on one process, and compare."""

from meshwise.verify.report import Divergence, Report
from meshwise.verify.verification import verify

__all__ = ["Divergence", "Report", "verify"]
