"""The depth axis: schedules as data, one verifier, one runner.

A schedule is a table of actions per rank, made by a pure function and proven before it
runs; the one-stage run is the smallest table. Only `runner.py` touches live objects.
"""
