"""stepmill's front-end beside the real ALF; `make test-originals` runs these."""
