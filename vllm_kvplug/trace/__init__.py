"""Operations at the scheduler's contract: recorded to a file, and driven again on any manager. Imports no vLLM."""
