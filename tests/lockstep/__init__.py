"""Lockstep: vLLM's manager and ours take the same random traffic, and every answer is compared after every call.

`trace.py` draws the traffic as data; `twins.py`, `population.py`, `scheduler.py` and `driver.py` carry it out as vLLM's
scheduler would; `compare.py` makes each call on both managers and compares answers and states; `runner.py` runs and
counts seeds and shrinks what fails. `mistakes.py` is the proof that it sees: deliberate faults in our modules, each of
which must be found. `python -m pytest tests/lockstep --lockstep-seeds 20000 --lockstep-first-seed 1000` runs more.
"""
