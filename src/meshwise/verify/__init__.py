"""Proof that the split model is the same model: a few steps under a plan and on one process, compared."""

from meshwise.verify.check import verify
from meshwise.verify.report import Divergence, Report

__all__ = ["Divergence", "Report", "verify"]
