"""The command line. No other package imports this one, and a command imports what it does when it runs.

main                 the entry point; turns exceptions into exit statuses
commands             the commands `run` and `replay`, and the group of all commands (click)
inspection_commands  the commands `top`, `trace`, `doctor`, `bench` and `tune` (click)
evaluate_command     the command `evaluate` (click)
options              kinds of options that several commands have (click)
"""
