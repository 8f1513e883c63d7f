"""What a user sees of a running pool: the command line, the live view, the reports. Nothing below imports this room."""
