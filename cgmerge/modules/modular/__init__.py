"""Modules that several tasks share, and which task uses which, learned together (Polytropon)."""

METHOD = "polytropon"
"""What a composition that came from it is called."""
