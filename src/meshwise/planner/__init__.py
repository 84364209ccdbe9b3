"""The choice of a plan: what could be tried, bounds that need no rehearsal, and rehearsals of what the bounds leave."""
