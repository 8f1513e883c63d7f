"""stepmill's front-end with the real ALF; `make test-originals` runs these."""
