"""Attention over tokens that are split over ranks, and sparse attention."""
