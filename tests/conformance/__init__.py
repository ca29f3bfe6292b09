"""vLLM's own tests, run against kvplug: `python -m tests.conformance`. See docs/conformance.md."""
