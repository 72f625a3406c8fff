"""Fault injection: what media, crashes and bugs do to a cache, done on purpose, many times.

    python -m benchmarks.faults [--only NAME ...] [--scale 0.1] [--seed 1] [--out faults.json]

Each run injects one fault and then asks three things. Was a byte that came back another than was stored (`wrong`)? Did
a call raise or miss its deadline, or did something that was reported durable not come back (`lost`)? Does the cache
serve again afterwards (`recovered`)? The first two must be 0, the last must be the number of runs.
"""
