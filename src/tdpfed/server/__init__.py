"""The server's half of a round, for simulator and Flower: who takes part, gate, averages, privacy, records."""
