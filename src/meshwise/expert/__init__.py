"""Mixtures of experts: divide their experts over ranks, exchange tokens, and balance routers."""
