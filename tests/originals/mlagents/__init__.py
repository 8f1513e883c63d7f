"""stepmill's front-end beside the real ML-Agents trainers; `make test-originals` runs these."""
