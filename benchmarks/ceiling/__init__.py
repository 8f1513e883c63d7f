"""What an engine could reach that waits for all envs in each step."""
