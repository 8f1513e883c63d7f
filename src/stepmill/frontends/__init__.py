"""Floor 5: one file for each library that learners are written in, on top of `Pool`."""
