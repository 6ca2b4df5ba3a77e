"""Measurements of jobs that change while they train."""
