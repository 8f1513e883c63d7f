"""stepmill's front-end beside the real DI-engine; `make test-originals` runs these."""
