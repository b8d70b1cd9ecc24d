"""The server's part of a round, for simulator and Flower: participation, gate, averages, privacy, records."""
