"""Configuration: its sections, how files are read, every key, and what is wrong with or unused in one."""
