"""The simulator: the round loop, runners, evaluation, diagnostics, the clients' state, several processes.

It runs any method and knows methods only by their interface, :class:`tdpfed.algorithms.Algorithm`.
"""
