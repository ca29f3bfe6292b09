"""Lockstep: vLLM's manager and ours take the same random traffic, and every answer is compared after every call.

- The traffic as data: `mixes.py` draws the KV cache groups, `trace.py` the rest of a setup and its operations.
- Carried out as vLLM's scheduler would: `twins.py`, `population.py`, `progress.py`, `admissions.py`, `scheduler.py`,
  `driver.py`.
- Compared: `compare.py` makes each call on both managers and compares answers and `states.py`; `oracle.py` answers
  lookups by trying every length, beside both.
- Where 0.17.1 is wrong: `deviations.py` says what triggers each public fault, `mends.py` and `mended_reports.py` put
  upstream's side right there, `triggers.py` counts it.
- `runner.py` runs and counts seeds and shrinks what fails.
- `mistakes.py`, `mistakes_groups.py` (by `mutation.py`) are the proof that it sees: deliberate faults in our modules,
  each of which must be found.

`python -m pytest tests/lockstep --lockstep-seeds 20000 --lockstep-first-seed 1000` runs more.
"""
