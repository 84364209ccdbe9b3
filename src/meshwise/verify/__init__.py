"""Check that a split model is the same model: train a few steps under a plan and on one process, and compare."""

from meshwise.verify.verification import verify
from meshwise.verify.verification_report import Divergence, Report

__all__ = ["Divergence", "Report", "verify"]
