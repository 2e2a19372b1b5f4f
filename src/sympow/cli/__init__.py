"""The command line: one module for each command, which parses its options and calls the library."""
