"""What `sympow check` does: tests an installation on the machine that it is installed on."""
