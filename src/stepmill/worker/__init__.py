"""What runs where the envs are: processes or threads that build envs, run the native loop and serve slow requests.

    env_host            builds envs, makes their native loop, serves, closes: the code that all backends share
    calls               what a slow request does to an env
    native_settings     the settings that the learner's and the workers' native code share
    build_progress      which env each worker constructs, in shared memory
    messages            the messages between learner, launcher and workers
    channel             sends and receives messages over a Unix socket, without blocking sends
    error_records       exceptions as text
    main                the main program of a worker process
    starter             the main program of the process that starts launchers
    launcher            the main program of the process that starts workers
    child_server        what starter and launcher share: children on request, and how they end
    fresh_interpreter   starts a Python process that runs one of these programs
    process_setup       prepares a new process to be a worker or the launcher
    module_contents     compares the user's modules in workers with those of the program
    program_state       warnings filters and registered envs, sent from the learner to fresh workers
    signals             defers signal handlers, which may raise, to where that is safe

No module here imports an RL library.
"""
