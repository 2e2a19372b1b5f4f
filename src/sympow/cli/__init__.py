"""The command `sympow`, one module for each subcommand. They parse options and call the library."""
