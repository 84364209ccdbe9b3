"""In process."""
