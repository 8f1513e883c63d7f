"""stepmill's front-end beside the real actorcritic; `make test-originals` runs these."""
