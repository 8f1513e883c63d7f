"""stepmill's front-end beside the real TorchRL; `make test-originals` runs these."""
