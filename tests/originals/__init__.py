"""Runs the tests of the libraries whose place a front-end takes: with their own classes, and with ours in their place."""
