"""A page about evaluation records: what it says, and how it looks."""
