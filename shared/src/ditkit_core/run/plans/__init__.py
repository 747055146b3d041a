"""Plans of runs, and what to change so that a run fits: `--plan`, `--fit` and the advice after
memory ran out.

It makes values of a run for the planner, which knows none. Start reading at plan.py, then
planned_step.py.
"""
