"""Replacements that must not pass, one deliberate fault each. See test_harness.py."""
