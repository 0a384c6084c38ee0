"""Code shared by all commands: their list, their help, the console, arguments and launchers."""
