"""Mixtures of experts: find them in a plain model, divide their experts over ranks, and exchange tokens."""
