"""Prompts and target-written answers: everything that becomes training data."""
