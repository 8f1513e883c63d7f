"""One file per peer: how its engine is built, stepped and closed. The interface is in `base.py`."""
