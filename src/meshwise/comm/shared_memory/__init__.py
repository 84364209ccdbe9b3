"""The world of CPU ranks on one host, which read and write each other's memory."""
