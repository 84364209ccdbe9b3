"""The command line `meshwise`: one file for each subcommand."""
