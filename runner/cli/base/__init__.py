"""Code that all commands share: the list of commands, their help, the console, arguments and launchers."""
