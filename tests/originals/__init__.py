"""Tests and programs that run with the libraries that the front-ends replace."""
