"""`kvplug bench`: what a manager's calls cost the scheduler, upstream and kvplug in turn in one process.

results      what results.json holds, and the ratios
sides        a manager under measurement: its construction, its requests, the calls as vLLM's scheduler makes them
measuring    turns, the garbage collector, cold caches
catalogue    all rows with their targets; `calls_*` are what they measure
manager_bench, scheduler_bench   the two commands
scheduler_loop, call_timer   vLLM's scheduler with fake model outputs, and the manager's share of it
plots, report   files and the terminal's table

docs/performance.md says how to read it. Nothing here looks into a manager: only vLLM's contract with it is used.
"""
