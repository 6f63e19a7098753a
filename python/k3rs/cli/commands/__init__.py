"""One module per command, each with `run(arguments, console)`."""
