"""Measure models on skills: tasks, scoring, statistics, records."""
