"""Cut a model into pipeline stages: run it on an example, choose where stages begin, and record their contents."""
