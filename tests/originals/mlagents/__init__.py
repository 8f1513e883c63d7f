"""stepmill's front-end with the real ML-Agents trainers; `make test-originals` runs these."""
