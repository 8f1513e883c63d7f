"""What a pool must do: one model, with which `tests.chaos` and `tests.fuzz` check every result, error and state.

    envs      envs whose observations hold their whole history, and that fail on demand
    results   rows of a batch as plain values
    records   what is known of env objects, rows, commands and envs
    model     predicts results and states
    calls     makes calls on a pool, and tells the model what they have done, also those that raised
    commands  steps, resets and receives

`tests.fuzz` plays short random programs, in which almost everything is certain. `tests.chaos` breaks workers from outside at any
time, so that any env may be lost at any time (`Setup.is_stormy`); what is not lost must be exact there, too.
"""
