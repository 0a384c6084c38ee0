"""What all commands share: their list, their help, the console, arguments and launchers."""
