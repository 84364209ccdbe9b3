"""A model seen from outside: its parameter table, its units, its ties and its initialisation."""
