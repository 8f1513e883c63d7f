"""The code of workers: processes or threads that build envs, run the native loop and serve slow requests.

    env_host            builds envs, makes their native loop, serves and closes; all backends share this code
    calls               makes slow requests, and serves them
    native_settings     the settings that the learner's and the workers' native code share
    shared_state        finds in the first steps that an env changes what other envs of its process see
    build_progress      shows in shared memory which env each lane constructs
    messages            the messages between learner, launcher and workers
    by_value            classes that workers get without an import of their packages
    channel             sends and receives messages over a Unix socket, without blocking sends
    error_records       exceptions as text
    main                the main program of a worker process
    launcher            the processes that start workers and report how they end, and the one that starts these
    fresh_interpreter   starts a Python process that runs one of these programs
    process_stat        what Linux says about a process
    process_setup       forks processes, and prepares them to be workers or launchers
    coroutines          runs envs whose methods are coroutines
    coroutine_server    the loop of a worker with such envs
    module_contents     compares the modules of workers with those of the program, and warns of differences
    program_state       warnings filters and registered envs, sent from the learner to fresh workers
    signals             defers signal handlers, which may raise exceptions, to safe places

No module here imports an RL library.
"""
