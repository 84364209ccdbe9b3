"""The command line `meshwise`: `main` chooses the subcommand, and each `*_command` file is one subcommand."""
