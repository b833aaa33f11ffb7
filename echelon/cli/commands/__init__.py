"""The implementations of the commands, each imported when its command is called."""
