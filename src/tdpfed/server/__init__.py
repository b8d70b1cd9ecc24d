"""The server's part of a round, for simulator and Flower: participation, gate, averages, privacy, records.

Methods are known here only by their interface, :class:`tdpfed.algorithms.Algorithm`.
"""
