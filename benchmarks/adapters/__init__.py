"""One file per peer: how its engine is built, stepped and closed. See `base.py` for what an adapter owes."""
