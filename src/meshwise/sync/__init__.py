"""Replicas that agree across steps, parameter servers, and modules that live on other ranks."""
